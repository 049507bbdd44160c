"""`hetctl run`: an unmodified torch.distributed program on emulated islands, by its own word or by nccl's."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from hetctl.app import app
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import ConfigError
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import ActiveRun, active
from hetctl.runs.program import ProgramRun
from tests.rigs.cluster import command, write_cluster
from tests.rigs.netns import Rig, RigHost

ROOT = Path(__file__).parents[3]
SPEC = "a100:1,mi300x:2"
PROGRAM = """
import sys, torch, torch.distributed as dist, torch.nn as nn
dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4, bias=False))
model(torch.full((2, 4), float(rank))).sum().backward()
print("gradient", model.module.weight.grad.sum().item(), "over", dist.get_backend(), flush=True)
inside = dist.new_group([1, 2])
if rank:
    value = torch.ones(1)
    dist.all_reduce(value, group=inside)
    print("inside", value.item(), type(inside).__name__, flush=True)
if len(sys.argv) > 2 and rank == 1:
    raise ValueError("planted \\033[31mred")
dist.barrier()
dist.destroy_process_group()
"""

STOPPED = """
import os, signal, sys, datetime, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(torch.ones(1), async_op=True).wait(datetime.timedelta(seconds=4))
"""


def run(
    tmp_path: Path, *argv: str, options: tuple[str, ...] = (), program: str = PROGRAM
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(program)
    command = [
        sys.executable,
        "-m",
        "hetctl",
        "run",
        "--emulate",
        "a100:1,mi300x:2",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command += [*options, "--", "python", str(tmp_path / "program.py"), *argv]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=400, check=False)


@pytest.mark.parametrize(
    ("word", "options"),
    [pytest.param("het", (), marks=pytest.mark.slow), ("nccl", ("--as-nccl",)), ("gloo", ("--as-nccl",))],
)
def test_a_stock_program_runs_across_islands(tmp_path: Path, word: str, options: tuple[str, ...]) -> None:
    done = run(tmp_path, word, options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(3):
        # the mean over ranks of 4 outputs x 2 samples x 4 inputs of the value `rank`
        assert f"[{rank}] gradient 32.0 over het" in done.stdout
    assert "[1] inside 2.0 ProcessGroup" in done.stdout


def test_a_program_that_fails_is_explained(tmp_path: Path) -> None:
    done = run(tmp_path, "het", "fail", options=("--json",))
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["status"] == "failed"
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["rank"] == 1
    assert "rank 1" in done.stderr
    assert "\033" not in done.stderr


@pytest.mark.slow
def test_a_stopped_rank_is_named_though_its_peers_lost_patience_first(tmp_path: Path) -> None:
    done = run(tmp_path, program=STOPPED)
    assert done.returncode == 1
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["rank"] == 1, failure
    assert "stopped it (SIGSTOP)" in failure["reason"]
    assert 0 in failure["victims"]


def test_a_script_alone_is_started_by_each_host_s_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.touch()
    nowhere = cast(Cluster, None)
    assert ProgramRun(("script.py", "a"), nowhere).program == ("python", "script.py", "a")
    assert ProgramRun((str(script),), nowhere).program == ("python", str(script))
    script.chmod(0o755)
    assert ProgramRun((str(script),), nowhere).program == (str(script),)  # its first line says who runs it
    assert ProgramRun(("script.py",), nowhere).program == ("python", "script.py")
    assert ProgramRun(("absent.py",), nowhere).program == ("absent.py",)


def test_an_error_before_any_rank_starts_leaves_no_run_on_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HETCTL_PORTS", "abc")
    result = CliRunner().invoke(app, ["run", "--emulate", "h200:1,mi325x:1", "--", "true"])
    assert isinstance(result.exception, ConfigError)
    assert "HETCTL_PORTS" in result.exception.message
    assert active() == []


@pytest.mark.parametrize(
    "argv", [("run", "--", "true"), ("train", "--model", "demo", "--set", "train.steps=1", "--no-check-parity")]
)
def test_a_run_is_on_file_until_how_it_ended_is_written(
    argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever follows its logs reads that when it is on file no more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write, on_file = RunFolder.write_summary, list[list[ActiveRun]]()

    def written(folder: RunFolder, summary: dict[str, Any]) -> None:
        on_file.append(active())
        write(folder, summary)

    monkeypatch.setattr(RunFolder, "write_summary", written)
    result = CliRunner().invoke(app, [argv[0], "--emulate", "h200:1,mi325x:1", *argv[1:]])
    assert result.exit_code == 0, result.output
    assert [len(runs) for runs in on_file] == [1]
    assert active() == []


def test_a_run_that_ended_clear_is_off_file_also_where_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def full(folder: RunFolder, summary: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr(RunFolder, "write_summary", full)
    result = CliRunner().invoke(app, ["run", "--emulate", "h200:1,mi325x:1", "--", "true"])
    assert isinstance(result.exception, OSError)
    assert active() == []


def test_what_is_no_program_is_said(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hetctl", "run", "--emulate", SPEC, "--bridge", "rdma", "--", "true"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert "rdma" in done.stderr
    assert list(tmp_path.iterdir()) == []


def two_hosts(folder: Path) -> Cluster:
    """A cluster file of two hosts that need not exist."""
    named = [RigHost(f"node{n}", "", f"10.9.9.{n}", folder, folder) for n in (1, 2)]
    return write_cluster(Rig(tuple(named), folder), {"h200": ((0, 1),), "mi325x": ((1, 1),)}, folder / "cluster.yaml")


def test_what_goes_to_hosts_is_said_before_any_is_entered(tmp_path: Path) -> None:
    two_hosts(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("train.py", "lib.py", ".env", "big.bin"):
        (tmp_path / "mine" / name).write_text(name)
    (tmp_path / "mine" / ".hetctlignore").write_text("*.bin\n")
    words = ("run", "--cluster", "cluster.yaml", "--dry-run", "--json", "--", sys.executable, "mine/train.py")
    done = subprocess.run(command(*words), cwd=tmp_path, text=True, capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "mine"
    assert f"sends 3 files, 20 B of {folder} (left out: .env, 1 by .hetctlignore)" in done.stderr
    assert json.loads(done.stdout)["sent"] == [".hetctlignore", "lib.py", "train.py"]
    assert not (tmp_path / "runs").exists()


def test_a_program_that_is_no_file_here_takes_nothing_along(tmp_path: Path) -> None:
    assert ProgramRun(("python", "-m", "there"), two_hosts(tmp_path)).sent is None
    (tmp_path / "x.py").touch()
    assert ProgramRun(("python", str(tmp_path / "x.py")), two_hosts(tmp_path)).sent is not None
    (tmp_path / ".gitignore").write_text("*\n")
    with pytest.raises(ConfigError, match=r"x.py does not travel"):
        _ = ProgramRun(("python", str(tmp_path / "x.py")), two_hosts(tmp_path)).sent
