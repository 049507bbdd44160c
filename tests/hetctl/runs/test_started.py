"""Jobs that torchrun or mpirun start: programs over `het` find their islands, `--launcher none` trains as over SSH."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.started import as_torchrun_says
from hetctl.comm.group.meeting import RankFacts, islands_of, link_layer, sentence
from tests.busy import busy
from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, write_cluster
from tests.rigs.torchrun import Torchrun

WHY_NOT = netns.unavailable()
real = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
NO_MPI = "" if shutil.which("mpirun") else "mpirun is missing: apt-get install openmpi-bin"
SETTINGS = ("model.seq_len=16", "batch.global_batch=8", "optimizer.warmup_steps=2", "checkpoint.every=5")
PROGRAM = """
import os, torch, torch.distributed as dist
os.environ["HETCTL_ISLAND"] = "red" if os.environ[{rank!r}] == "2" else "green"
dist.init_process_group("het")
value = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(value)
group = dist.new_group([0, 2])
if dist.get_rank() != 1:
    dist.all_reduce(value, group=group)
os.write(1, f"{{dist.get_rank()}} {{value.tolist()}}\\n".encode())
dist.destroy_process_group()
"""
SUMS = {"0 [12.0, 12.0, 12.0]", "1 [6.0, 6.0, 6.0]", "2 [12.0, 12.0, 12.0]"}


def facts(**more: str) -> RankFacts:
    return RankFacts(**{**_A_RANK, **more})


_A_RANK = {"host": "n1", "boot": "b1", "address": "10.0.0.1", "vendor": "nvidia", "torch_backend": "nccl"} | {
    "fabric": "InfiniBand",
    "release": "2.13",
}


def test_islands_are_what_one_library_joins() -> None:
    other = {"host": "n2", "boot": "b2", "address": "10.0.0.2"}
    found = islands_of([facts(), facts(**other), facts(**other, vendor="amd"), facts(**other, fabric="Ethernet")])
    assert [(i.name, i.ranks) for i in found.islands] == [
        ("nvidia", (0, 1)),
        ("amd", (2,)),
        ("nvidia-Ethernet-2.13", (3,)),
    ]
    assert {b.transport for b in found.bridges} == {"tcp"}
    assert sentence(found).startswith("hetctl: islands nvidia (nccl, ranks 0-1), amd (nccl, ranks 2)")
    here = islands_of([facts(), facts(vendor="amd")])
    assert [b.transport for b in here.bridges] == ["shm"]
    assert sentence(islands_of([facts(), facts()])).endswith("nothing to bridge")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([facts(island="x"), facts(island="x", torch_backend="gloo")], "ranks of gloo, nccl: one library"),
        ([facts(address="127.0.0.1"), facts(host="n2", boot="b2")], "n1 has only a loopback address"),
    ],
)
def test_ranks_that_cannot_be_islands_are_named(ranks: list[RankFacts], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        islands_of(ranks)


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ({"RANK": "1", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, {}),
        ({}, {}),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "7"},
            {"RANK": "1", "WORLD_SIZE": "2"},
        ),
        (
            {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "gpu[07-08],a1"},
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"},
        ),
        (
            {f"OMPI_COMM_WORLD_{name}": "1" for name in ("SIZE", "LOCAL_SIZE")}
            | {f"OMPI_COMM_WORLD_{name}": "0" for name in ("RANK", "LOCAL_RANK")},
            {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        ),
    ],
)
def test_other_launchers_words_are_torchruns(said: Mapping[str, str], means: Mapping[str, str]) -> None:
    assert as_torchrun_says(said) == means


def test_who_does_not_say_where_rank_0_is_is_told_how() -> None:
    said = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(ConfigError, match="MASTER_ADDR does not say where rank 0 is"):
        as_torchrun_says(said)


def test_a_fabric_is_that_of_active_ports(tmp_path: Path) -> None:
    for name, state, layer in (("mlx5_0", "4: ACTIVE", "Ethernet"), ("mlx5_1", "1: DOWN", "InfiniBand")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "link_layer").write_text(f"{layer}\n")
    assert link_layer(tmp_path) == "Ethernet"
    assert link_layer(tmp_path / "none") == ""


@pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)
def test_a_program_under_mpirun_finds_its_islands(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(rank="OMPI_COMM_WORLD_RANK"))
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable, str(script)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    done = subprocess.run(words, text=True, capture_output=True, timeout=120 * busy(), env=env)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == SUMS


class Job(Torchrun):
    """hetctl's trainer in such jobs."""

    def train(self, run: str, *words: str, steps: int) -> list[subprocess.Popen[str]]:
        keys = [w for key in (*SETTINGS, f"train.steps={steps}") for w in ("--set", key)]
        return self.start("-m", "hetctl", "train", "--launcher", "none", "--run-dir", run, *keys, *words)

    def steps(self, run: str) -> int:
        file = self.folder / run / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, output) of each."""
    said = [process.communicate(timeout=200 * busy()) for process in started]
    return [(p.returncode, "".join(texts)) for p, texts in zip(started, said, strict=True)]


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120 * busy()
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def _kill(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("job")
    with netns.hosts([netns.HostSpec(sshd=False)] * 2, folder / "rig") as rig:
        write_cluster(rig, {"h200": ((0, 1),), "mi325x": ((1, 2),)}, folder / "cluster.yaml")
        (folder / "program.py").write_text(PROGRAM.format(rank="RANK"))
        yield Job(rig, folder)


def losses_here(job: Job, steps: int) -> list[float]:
    """The same plan's losses on this machine."""
    keys = [w for key in (*SETTINGS, f"train.steps={steps}") for w in ("--set", key)]
    for words in (
        ("plan", "--model", "demo", "--cluster", "cluster.yaml", "-o", "plan.yaml"),
        ("train", "--plan", "plan.yaml", "--run-dir", "alone"),
    ):
        done = subprocess.run(
            command(*words, *keys), cwd=job.folder, env=environment(job.rig), text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
    return losses(job.folder / "alone")


@real
def test_a_stock_torchrun_needs_one_word(job: Job) -> None:
    found = ended(job.start("program.py", processes=(2, 1)))
    assert [code for code, _ in found] == [0, 0], found
    said = "".join(text for _, text in found)
    assert {line for line in said.splitlines() if line[:1].isdigit()} == SUMS
    assert "hetctl: islands green (gloo, ranks 0-1), red (gloo, ranks 2)" in said


@real
def test_it_trains_is_interrupted_and_goes_on(job: Job) -> None:
    started = job.train("both", "--cluster", "cluster.yaml", steps=60)
    try:
        _until(lambda: job.steps("both") > 6)
        started[0].send_signal(signal.SIGTERM)
        first = ended(started)
    finally:
        _kill(started)
    assert first[0][0] != 0
    assert json.loads((job.folder / "both" / "summary.json").read_text())["status"] == "interrupted", first
    assert job.ours() == []
    again = ended(job.train("both", "--cluster", "cluster.yaml", steps=60))
    assert [code for code, _ in again] == [0, 0], again
    assert "continuing from step" in again[0][1]
    assert losses(job.folder / "both") == pytest.approx(losses_here(job, 60), rel=1e-5)
    assert job.ours() == []


@real
def test_a_lost_host_is_named(job: Job) -> None:
    started = job.train("lost", "--cluster", "cluster.yaml", steps=4000)
    try:
        _until(lambda: job.steps("lost") > 2)
        for pid in job.rig.hosts[1].pids():
            os.kill(pid, signal.SIGKILL)
        found = ended(started)
    finally:
        _kill(started)
    assert found[0][0] != 0
    assert job.rig.hosts[1].name in json.loads((job.folder / "lost" / "failure.json").read_text())["reason"]
    assert job.ours() == []


@real
@pytest.mark.slow
def test_processes_end_with_whoever_started_them_and_what_a_lost_leader_left_is_cleaned(job: Job) -> None:
    started = job.train("orphaned", "--cluster", "cluster.yaml", steps=4000)
    try:
        _until(lambda: job.steps("orphaned") > 2)
        for process in started:
            process.kill()
        _until(lambda: job.ours() == [])
    finally:
        _kill(started)
    started = job.train("killed", "--cluster", "cluster.yaml", steps=4000)
    try:
        _until(lambda: job.steps("killed") > 2)
        for pid in job.rig.hosts[0].pids():
            os.kill(pid, signal.SIGKILL)
        _until(lambda: job.ours() == [])
    finally:
        _kill(started)
    here = job.rig.hosts[0]
    env = environment(job.rig, XDG_STATE_HOME=str(job.folder / here.name))
    inside = ["ip", "netns", "exec", here.namespace, "unshare", "--uts", "sh", "-c", 'hostname "$1"; shift; exec "$@"']
    clean = [*inside, "sh", here.name, *command("clean")]
    done = subprocess.run(clean, cwd=job.folder, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert f"killed on {job.rig.hosts[1].name}: its processes end with the job that held these hosts" in done.stdout
    assert f"killed on {here.name}: 0 processes found, 0 left" in done.stdout


def test_who_was_not_started_is_told(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    env = {k: v for k, v in env.items() if not k.startswith("SLURM_")}
    done = subprocess.run(command("train", "--launcher", "none"), cwd=tmp_path, env=env, text=True, capture_output=True)
    assert done.returncode == 2
    assert "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set" in done.stderr
    assert list(tmp_path.iterdir()) == []
