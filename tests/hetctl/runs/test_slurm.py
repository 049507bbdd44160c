"""hetctl under a real Slurm of two partitions, whose nodes have no SSH server: in allocations, and as batch jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access, Host
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.engines.slurm import Slurm
from hetctl.launcher.engines.slurm_jobs import Component, NodeFacts, batch_script, components_of, node_facts
from hetctl.launcher.run_folder.registry import ActiveRun
from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, write_cluster
from tests.rigs.slurm import Site, slurm, unavailable, without_accounting

WHY_NOT = unavailable()
real = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ISLANDS = {"h200": ((0, 1), (1, 1)), "mi325x": ((2, 1),)}
SETTINGS = ("model.seq_len=16", "batch.global_batch=8", "optimizer.warmup_steps=2", "checkpoint.every=5")
STEPS = 200  # so many that what comes in between comes before they are made
PROGRAM = 'import os; print("from", os.environ["SLURMD_NODENAME"], os.environ["RANK"], flush=True)\n'


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mine")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, mine: Path) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with (
        netns.hosts([netns.HostSpec(sshd=False)] * 3, folder / "rig") as rig,
        slurm(rig, {"green": (0, 1), "red": (2,)}, folder / "slurm", urgent=(2,)) as site,
    ):
        write_cluster(rig, ISLANDS, mine / "cluster.yaml")
        (mine / "here.py").write_text(PROGRAM)
        yield site


def hetctl(site: Site, mine: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = environment(site.rig, **site.environment)
    return subprocess.run([*before, *command(*words)], cwd=mine, env=env, text=True, capture_output=True, timeout=400)


def train(site: Site, mine: Path, run: str, *words: str, steps: int) -> subprocess.CompletedProcess[str]:
    return hetctl(site, mine, "train", "--cluster", "cluster.yaml", "--run-dir", run, *_settings(steps), *words)


def _settings(steps: int) -> list[str]:
    return [w for key in (*SETTINGS, f"train.steps={steps}") for w in ("--set", key)]


def submitted(site: Site, mine: Path, run: str, *, steps: int) -> int:
    done = train(site, mine, run, "--launcher", "slurm", "--json", steps=steps)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["job"])


def status(mine: Path, run: str) -> str:
    file = mine / run / "summary.json"
    return str(json.loads(file.read_text())["status"]) if file.is_file() else ""


def steps_made(mine: Path, run: str) -> int:
    file = mine / run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.fixture(scope="module")
def alone(site: Site, mine: Path) -> list[float]:
    """The same plan's losses on this machine."""
    words = ("--cluster", "cluster.yaml", "-o", "plan.yaml", *_settings(STEPS))
    plan = hetctl(site, mine, "plan", "--model", "demo", *words)
    assert plan.returncode == 0, plan.stderr
    done = hetctl(site, mine, "train", "--plan", "plan.yaml", "--run-dir", "alone", *_settings(STEPS))
    assert done.returncode == 0, done.stderr
    return losses(mine / "alone")


BOTH = ("salloc", "--nodes=2", "--partition=green", ":", "--nodes=1", "--partition=red")


@real
def test_in_a_heterogeneous_allocation_each_node_is_a_step(site: Site, mine: Path) -> None:
    words = ("run", "--cluster", "cluster.yaml", "--run-dir", "program", "--", "python", "here.py")
    done = hetctl(site, mine, *words, before=BOTH)
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.split(" ", 1)[1] for line in done.stdout.splitlines() if "] from " in line}
    assert said == {f"from {host.name} {n}" for n, host in enumerate(site.rig.hosts)}


@real
def test_discovery_enters_the_allocations_nodes_by_steps(site: Site, mine: Path) -> None:
    done = hetctl(site, mine, "discover", "-o", "found.yaml", "--json", before=BOTH)
    assert done.returncode == 0, done.stderr
    assert [host["name"] for host in json.loads(done.stdout)["hosts"]] == [host.name for host in site.rig.hosts]


@real
def test_nodes_of_two_partitions_are_one_job(site: Site, mine: Path, alone: list[float]) -> None:
    job = submitted(site, mine, "both", steps=STEPS)
    script = (mine / "both" / "launch" / "sbatch.sh").read_text()
    assert "#SBATCH hetjob" in script
    assert "--partition=green" in script
    assert "--partition=red" in script
    shown = json.loads(hetctl(site, mine, "ps", "--json").stdout)["runs"]
    assert [(run["run"], run["job"]) for run in shown] == [("both", job)]
    site.until(lambda: status(mine, "both") != "")
    assert status(mine, "both") == "done", (mine / "both" / "console.log").read_text()
    assert losses(mine / "both") == pytest.approx(alone, rel=1e-5)
    site.until(lambda: not site.ask("squeue", "--noheader"))
    assert json.loads(hetctl(site, mine, "ps", "--json").stdout)["runs"] == []
    assert not [p for host in site.rig.hosts for p in host.pids() if "hetctl" in _words(p)]


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@real
@pytest.mark.slow
@pytest.mark.parametrize("how", ["preempted", "time limit"])
def test_a_job_that_is_interrupted_goes_on_by_itself(site: Site, mine: Path, alone: list[float], how: str) -> None:
    run = how.replace(" ", "-")
    job = submitted(site, mine, run, steps=STEPS)
    site.until(lambda: steps_made(mine, run) > 12)
    if how == "preempted":
        site.ask("sbatch", "--partition=urgent", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    else:
        site.ask("scancel", "--signal=USR2", "--batch", str(job))
    site.until(lambda: status(mine, run) == "done")  # Slurm waits two minutes until it starts it again
    console = (mine / run / "console.log").read_text()
    assert "continuing from step" in console
    assert losses(mine / run)[-5:] == pytest.approx(alone[-5:], rel=1e-5)
    site.until(lambda: not site.ask("squeue", "--noheader"))


@real
def test_stopped_it_saves_and_resume_submits_it_again(site: Site, mine: Path, alone: list[float]) -> None:
    submitted(site, mine, "stopped", steps=STEPS)
    site.until(lambda: steps_made(mine, "stopped") > 3)
    done = hetctl(site, mine, "stop", "stopped")
    assert done.returncode == 0, done.stderr
    assert status(mine, "stopped") == "interrupted"
    again = hetctl(site, mine, "resume", "stopped", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["status"] == "submitted"
    site.until(lambda: status(mine, "stopped") == "done")
    assert losses(mine / "stopped")[-5:] == pytest.approx(alone[-5:], rel=1e-5)


@real
def test_what_waits_is_shown_and_cancelled(site: Site, mine: Path) -> None:
    with held(site, "red"):
        job = submitted(site, mine, "waits", steps=STEPS)
        again = train(site, mine, "waits", "--launcher", "slurm", steps=STEPS)
        assert again.returncode == 2, again.stderr
        assert f"Slurm has as job {job}" in again.stderr
        (run,) = json.loads(hetctl(site, mine, "ps", "--json").stdout)["runs"]
        assert (run["run"], run["state"], run["job"], run["step"]) == ("waits", "queued", job, None)
        done = hetctl(site, mine, "stop", "waits")
        assert done.returncode == 0, done.stderr
        assert json.loads(hetctl(site, mine, "ps", "--json").stdout)["runs"] == []


@contextlib.contextmanager
def held(site: Site, partition: str) -> Iterator[None]:
    """The partition is somebody else's for as long as the block lasts."""
    words = (f"--partition={partition}", "--exclusive", "--output=/dev/null", "--wrap=sleep 300")
    job = site.ask("sbatch", "--parsable", *words).strip()
    try:
        site.until(lambda: site.ask("squeue", "--noheader", f"--jobs={job}", "--format=%T").strip() == "RUNNING")
        yield
    finally:
        site.ask("scancel", job)


@real
def test_a_lost_node_is_named(site: Site, mine: Path) -> None:
    submitted(site, mine, "lost", steps=4000)
    site.until(lambda: steps_made(mine, "lost") > 3)
    last = site.rig.hosts[-1]
    for pid in last.pids():
        if "slurmd" not in _words(pid).split("\0")[0]:
            os.kill(pid, signal.SIGKILL)
    site.until(lambda: status(mine, "lost") != "")
    assert status(mine, "lost") == "failed"
    assert last.name in json.loads((mine / "lost" / "failure.json").read_text())["reason"]
    site.until(lambda: not site.ask("squeue", "--noheader"))


@real
@pytest.mark.skipif(bool(without_accounting()), reason=without_accounting())
def test_what_became_of_a_job_is_asked_of_accounting(site: Site, mine: Path) -> None:
    submitted(site, mine, "ended", steps=4000)
    site.until(lambda: steps_made(mine, "ended") > 0)
    for pid in site.rig.hosts[0].pids():
        if "hetctl" in _words(pid) and "slurm" not in _words(pid):
            os.kill(pid, signal.SIGKILL)
    site.until(lambda: not site.ask("squeue", "--noheader"))
    assert "lost: Slurm says failed (hetctl clean)" in " ".join(hetctl(site, mine, "ps").stdout.split())
    assert hetctl(site, mine, "clean", "ended").returncode == 0


def test_nodes_outside_the_allocation_are_named() -> None:
    held = Slurm(
        {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "a1"}
    )
    held.check([Host("n1"), Host("a1")], None, print)
    with pytest.raises(ConfigError, match="node9"):
        held.check([Host("n1"), Host("node9")], None, print)


def stand_in(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_controller_that_does_not_answer_has_lost_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    stand_in(tmp_path / "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    run = ActiveRun("r", "/r", pid=0, born="", started=0.0, hosts={}, way="slurm", job=7)
    assert run.supervised
    assert run.state.startswith("unknown: squeue refused")


def test_components_are_as_few_as_partitions_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_GRES"):
        monkeypatch.delenv(name, raising=False)
    hosts = [Host(name, access=Access(name)) for name in ("n1", "n2", "a1")]
    green, red = NodeFacts(("green", "all"), "gpu:h100:8"), NodeFacts(("red", "all"), "gpu:mi300x:8")
    both = components_of(hosts, {"n1": green, "n2": green, "a1": red})
    assert both == (
        Component(("n1", "n2"), ("--partition=all", "--gres=gpu:h100:8")),
        Component(("a1",), ("--partition=all", "--gres=gpu:mi300x:8")),
    )
    assert components_of(hosts[:2], {"n1": green, "n2": green})[0].options[0] == "--partition=green", "the default one"
    apart = components_of(hosts, {"n1": NodeFacts(("green",)), "n2": NodeFacts(("green",)), "a1": NodeFacts(("red",))})
    assert [c.options for c in apart] == [("--partition=green",), ("--partition=red",)]
    own = Host("a1", access=Access("a1", slurm=("--partition=mine", "--gres=gpu:4")))
    assert components_of([own], {"a1": red}) == (Component(("a1",), ("--partition=mine", "--gres=gpu:4")),)


def test_no_job_of_others_is_ended_by_the_partition_that_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    lines = ["a1|urgent|9|(null)", "a1|red|1|(null)", "n1|urgent|9|gpu:h100:8(S:0)", "n1|green*|9|gpu:h100:8(S:0)"]
    for order in (lines, lines[::-1]):
        stand_in(tmp_path / "sinfo", "\n".join(["cat <<END", *order, "END"]))
        known = {"a1": NodeFacts(("red", "urgent")), "n1": NodeFacts(("green", "urgent"), "gpu:h100:8")}
        assert node_facts(["a1", "n1"]) == known
        assert components_of([Host("a1")], node_facts(["a1"])) == (Component(("a1",), ("--partition=red",)),)


def test_nothing_in_the_script_is_read_by_its_shell(tmp_path: Path) -> None:
    folder = tmp_path / "$(touch harm)" / "a'b" / "two words"
    script = batch_script("x", [Component(("node1",))], output=folder / "o", cwd=folder, argv=["python", str(folder)])
    (output,) = (line for line in script.splitlines() if line.startswith("#SBATCH --output="))
    assert shlex.split(output.removeprefix("#SBATCH --output="), comments=False) == [f"{folder}/o"]
    assert shlex.split(script.splitlines()[-1])[-1] == str(folder)
    for bad in (
        Component(("node1\n#SBATCH --x",)),
        Component(("n1",), ("--x\n#SBATCH --y",)),
        Component(("n1",), ("x",)),
    ):
        with pytest.raises(ConfigError):
            batch_script("x", [bad], output=folder, cwd=folder, argv=[])
