"""hetctl under a real Ray cluster of unlike nodes, which have no SSH server: placed by a placement group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rigs import netns
from tests.rigs.cluster import command, environment, losses, write_cluster
from tests.rigs.ray_cluster import RaySite, ray_cluster, unavailable

WHY_NOT = unavailable()
real = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ISLANDS = {"h200": ((0, 1), (1, 1)), "mi325x": ((2, 1),)}
RESOURCES = ({"green": 1}, {"green": 1}, {"red": 2})
SETTINGS = ("model.seq_len=16", "batch.global_batch=8", "optimizer.warmup_steps=2", "checkpoint.every=5")
PROGRAM = 'import os; print("rank", os.environ["RANK"], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)\n'
STEPS = 20


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mine")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, mine: Path) -> Iterator[RaySite]:
    folder = tmp_path_factory.mktemp("site")
    with (
        netns.hosts([netns.HostSpec(sshd=False)] * 3, folder / "rig") as rig,
        ray_cluster(rig, folder / "ray", resources=RESOURCES) as site,
    ):
        write_cluster(rig, ISLANDS, mine / "cluster.yaml")
        (mine / "here.py").write_text(PROGRAM)
        yield site


def hetctl(site: RaySite, mine: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = environment(site.rig, **site.environment)
    return subprocess.run(command(*words), cwd=mine, env=env, text=True, capture_output=True, timeout=300)


def words_of(run: str, steps: int) -> tuple[str, ...]:
    settings = [w for key in (*SETTINGS, f"train.steps={steps}") for w in ("--set", key)]
    return ("train", "--cluster", "cluster.yaml", "--run-dir", run, "--launcher", "ray", *settings)


def begin(site: RaySite, mine: Path, run: str, *, steps: int) -> subprocess.Popen[bytes]:
    """A run that has made some steps."""
    with (mine / f"{run}.out").open("wb") as out:
        env = environment(site.rig, **site.environment)
        argv = command(*words_of(run, steps))
        begun = subprocess.Popen(argv, cwd=mine, env=env, stdout=out, stderr=out, start_new_session=True)
    until(lambda: steps_made(mine, run) > 6 or begun.poll() is not None)
    assert begun.poll() is None, (mine / f"{run}.out").read_text()
    return begun


def until(true: Callable[[], bool], *, seconds: float = 400.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def steps_made(mine: Path, run: str) -> int:
    file = mine / run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def left(site: RaySite) -> list[int]:
    """What runs of hetctl on the hosts: agents and ranks, by the mark of their run."""
    return [pid for host in site.rig.hosts for pid in host.pids() if b"HETCTL_RUN=" in _environment(pid)]


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def reason(mine: Path, run: str) -> str:
    return str(json.loads((mine / run / "failure.json").read_text())["reason"])


@real
def test_discovery_takes_rays_nodes_but_not_a_head_without_cores(site: RaySite, mine: Path) -> None:
    done = hetctl(site, mine, "discover", "--from", "ray", "-o", "found.yaml", "--json")
    assert done.returncode == 0, done.stderr
    hosts = json.loads(done.stdout)["hosts"]
    assert [host["name"] for host in hosts] == [host.name for host in site.rig.hosts]
    assert [host["data_address"] for host in hosts] == [host.address for host in site.rig.hosts]
    assert {host["access"]["way"] for host in hosts} == {"ray"}


@real
def test_a_program_runs_where_discovery_found_the_hosts_and_sees_all_devices(site: RaySite, mine: Path) -> None:
    if not (mine / "found.yaml").is_file():
        hetctl(site, mine, "discover", "--from", "ray", "-o", "found.yaml")
    done = hetctl(site, mine, "run", "--cluster", "found.yaml", "--run-dir", "program", "--", "python", "here.py")
    assert done.returncode == 0, done.stdout + done.stderr
    said = {line.split(" ", 1)[1] for line in done.stdout.splitlines() if "] rank " in line}
    assert said == {f"rank {n} None" for n in range(3)}
    assert "ray" not in done.stderr.replace(str(mine), "").lower()  # it has nothing to say in a person's console


@real
def test_two_islands_train_as_one_machine_does(site: RaySite, mine: Path) -> None:
    done = hetctl(site, mine, *words_of("both", STEPS))
    assert done.returncode == 0, done.stderr
    assert losses(mine / "both") == pytest.approx(alone(site, mine), rel=1e-5)
    until(lambda: not left(site))


def alone(site: RaySite, mine: Path) -> list[float]:
    """The same plan's losses on this machine."""
    settings = words_of("", STEPS)[7:]
    plan = hetctl(site, mine, "plan", "--model", "demo", "--cluster", "cluster.yaml", "-o", "plan.yaml", *settings)
    assert plan.returncode == 0, plan.stderr
    done = hetctl(site, mine, "train", "--plan", "plan.yaml", "--run-dir", "alone", *settings)
    assert done.returncode == 0, done.stderr
    return losses(mine / "alone")


@real
@pytest.mark.slow
def test_interrupted_it_saves_and_is_resumed(site: RaySite, mine: Path) -> None:
    run = begin(site, mine, "stopped", steps=4000)
    run.send_signal(signal.SIGTERM)
    assert run.wait(400) == 143, (mine / "stopped.out").read_text()
    until(lambda: not left(site))
    made = steps_made(mine, "stopped")
    done = hetctl(site, mine, "resume", "stopped", "--set", f"train.steps={made + 3}")
    assert done.returncode == 0, done.stderr
    assert len(losses(mine / "stopped")) == made + 3


@real
@pytest.mark.slow
def test_a_lost_node_is_named_and_the_rest_goes_on_without_it(site: RaySite, mine: Path) -> None:
    run = begin(site, mine, "lost", steps=4000)
    last = site.rig.hosts[-1].name
    site.kill_node(2)
    try:
        assert run.wait(200) == 1, (mine / "lost.out").read_text()
        assert last in reason(mine, "lost")
        until(lambda: not left(site))
        refused = hetctl(site, mine, "resume", "lost")
        assert refused.returncode == 4, refused.stderr
        assert f"{last}: Ray has no live node of that name" in refused.stderr
        made = steps_made(mine, "lost")
        words = ("resume", "lost", "--allow-missing", "--set", f"train.steps={made + 2}")
        done = hetctl(site, mine, *words)
        assert done.returncode == 0, done.stderr
    finally:
        site.start_node(2)
        site.await_nodes()


@real
@pytest.mark.slow
def test_when_the_driver_is_killed_nothing_is_left(site: RaySite, mine: Path) -> None:
    run = begin(site, mine, "driver", steps=4000)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait(10)
    until(lambda: not left(site))


@real
@pytest.mark.slow
def test_nodes_that_somebody_else_holds_are_named(site: RaySite, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = (
        "import ray, sys; ray.init(address='auto', logging_level='ERROR')\n"
        "group = ray.util.placement_group([{'red': 1.0}]); assert group.wait(30)\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    program = (
        "import hetctl.launcher.engines.ray_cluster as ours; ours.GIVEN_S = 1.0\nfrom hetctl.app import main; main()\n"
    )
    env = environment(site.rig, **site.environment)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", holder], env={**os.environ, **env}, stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        argv = [sys.executable, "-c", program, *words_of("refused", STEPS)]
        done = subprocess.run(argv, cwd=mine, env=env, text=True, capture_output=True, timeout=120)
        assert other.stdin is not None
        other.stdin.close()
    assert done.returncode == 4, done.stderr
    assert "waiting for Ray to give 3 nodes, for at most 1 s" in done.stdout
    assert f"{site.rig.hosts[-1].name}: 1 of its 2 red are free" in done.stderr


@real
def test_without_a_cluster_it_says_so(tmp_path: Path) -> None:
    env = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}
    argv = command("discover", "--from", "ray")
    done = subprocess.run(argv, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 4, done.stderr
    assert "no Ray cluster was entered" in done.stderr
    assert "Traceback" not in done.stderr
