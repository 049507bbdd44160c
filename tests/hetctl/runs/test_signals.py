"""Signals to a run on this machine: stop and save, end at once, save and go on, save and end; and the kernel's own."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.busy import busy

ROOT = Path(__file__).parents[3]
SMALL = ("model.seq_len=16", "batch.global_batch=4", "train.validation_samples=4", "checkpoint.every=0")
MEMORY = Path("/sys/fs/cgroup/memory")
HOG = """
import os, time
if os.environ["RANK"] == "1":
    hoard = [b"x" * (1 << 20) for _ in range(100_000)]
time.sleep(600)
"""


class Running:
    """A training in the background that would take for ever."""

    def __init__(self, run: Path, *more: str) -> None:
        settings = [word for key in (*SMALL, "train.steps=100000") for word in ("--set", key)]
        argv = [sys.executable, "-m", "hetctl", "train", "--emulate", "h200:1,mi325x:1", "--run-dir", str(run)]
        self.run, pipe = run, subprocess.PIPE
        heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # nohup, which tests may run under, is inherited
        self.process = subprocess.Popen(
            [*argv, *settings, *more], cwd=ROOT, text=True, stdout=pipe, stderr=pipe, preexec_fn=heard
        )

    def await_steps(self, count: int) -> None:
        wait_for(lambda: self.steps() >= count)

    def steps(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def checkpoints(self) -> list[str]:
        """Those that are whole: one that is being written has its manifest before its name."""
        return sorted(p.name for p in (self.run / "checkpoints").glob("step-*") if not p.suffix)

    def processes(self, *variables: str) -> list[int]:
        """Those on hosts that have the run's mark in their environment, and these variables."""
        wanted, found = {f"HETCTL_RUN={(self.run / 'launch' / 'identity').read_text()}", *variables}, []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if wanted <= set(file.read_text().split("\0")):
                    found.append(int(file.parent.name))
        return found

    def end(self) -> dict[str, Any]:
        self.said = "".join(self.process.communicate(timeout=400))
        summary: dict[str, Any] = json.loads((self.run / "summary.json").read_text())
        assert summary["processes_left"] == 0
        return summary


def wait_for(condition: Callable[[], Any], seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    started = Running(tmp_path / "run")
    started.await_steps(2)
    yield started
    started.process.kill()


def test_usr1_saves_and_goes_on_usr2_saves_and_ends_well(running: Running) -> None:
    running.process.send_signal(signal.SIGUSR1)
    wait_for(running.checkpoints)
    saved = running.checkpoints()
    running.await_steps(running.steps() + 2)
    running.process.send_signal(signal.SIGUSR2)
    summary = running.end()
    assert (running.process.returncode, summary["status"]) == (0, "saved"), running.said
    assert running.checkpoints() == [*saved, f"step-{summary['steps']:08d}"]


def test_a_rank_that_somebody_tells_to_end_interrupts_the_run(running: Running) -> None:
    (rank,) = running.processes("RANK=1")
    os.kill(rank, signal.SIGTERM)
    summary = running.end()
    assert (running.process.returncode, summary["status"]) == (143, "interrupted"), running.said
    assert running.checkpoints() == [f"step-{summary['steps']:08d}"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_term_or_a_closed_terminal_stops_and_saves(running: Running, number: int) -> None:
    running.process.send_signal(number)
    summary = running.end()
    assert (running.process.returncode, summary["status"]) == (128 + number, "interrupted"), running.said
    assert summary["signal"] == number
    assert running.checkpoints() == [f"step-{summary['steps']:08d}"]


def test_ctrl_c_under_a_pipe_to_tee_saves_and_ends_as_it_says(tmp_path: Path) -> None:
    """The terminal's signal ends tee at once, and with it the stream that hetctl has its words on."""
    log = tmp_path / "log"
    settings = [word for key in (*SMALL, "train.steps=100000") for word in ("--set", key)]
    argv = [sys.executable, "-m", "hetctl", "train", "--emulate", "h200:1,mi325x:1", "--run-dir", "{run}", *settings]
    run = tmp_path / "run"
    line = f"{shlex.join(argv).replace('{run}', str(run))} 2>&1 | tee {log}; echo ${{PIPESTATUS[0]}} > {tmp_path}/code"
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    shell = subprocess.Popen(
        ["bash", "-c", f"trap : INT; {line}"],
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=heard,
        stdout=subprocess.PIPE,
    )
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2)
    os.killpg(shell.pid, signal.SIGINT)
    shell.communicate(timeout=400)
    assert (tmp_path / "code").read_text() == "130\n", log.read_text()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["processes_left"]) == ("interrupted", 0)
    assert [p.name for p in (run / "checkpoints").glob("step-*")] == [f"step-{summary['steps']:08d}"]


@pytest.mark.slow
def test_a_reader_that_stops_reading_ends_no_run(tmp_path: Path) -> None:
    """Full before the ranks begin, the pipe takes no word of the run; its hosts' lease of 15 s must not lapse."""
    running = Running(tmp_path / "run")
    assert running.process.stdout is not None
    assert running.process.stderr is not None
    running.await_steps(2)
    for stream in (running.process.stdout, running.process.stderr):
        fcntl.fcntl(stream, fcntl.F_SETPIPE_SZ, 4096)
        with suppress(BlockingIOError):  # fill it to the brim, from the reader's side
            end = os.open(f"/proc/self/fd/{stream.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
            while True:
                os.write(end, b"x")
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 25)
    steps = running.steps()
    running.await_steps(steps + 2)
    running.process.send_signal(signal.SIGUSR2)
    running.process.wait(400)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (running.process.returncode, summary["status"]) == (0, "saved")


@pytest.mark.slow
def test_a_last_save_that_fails_is_said_though_the_run_was_interrupted(running: Running) -> None:
    """The checkpoints' folder is in the way of itself: it is a file."""
    shutil.rmtree(running.run / "checkpoints", ignore_errors=True)
    (running.run / "checkpoints").touch()
    running.process.send_signal(signal.SIGINT)
    summary = running.end()
    assert (running.process.returncode, summary["status"]) == (130, "interrupted"), running.said
    failure = json.loads((running.run / "failure.json").read_text())
    assert "checkpoints" in failure["reason"]
    assert summary["failure"] == failure["reason"]
    said = " ".join(running.said.split())
    assert f"the run was interrupted, and failed before it had ended: {failure['reason']}" in said
    assert "may be lost" in said


@pytest.mark.slow
def test_what_failed_before_is_not_blamed_once_a_run_goes_on(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    running.end()
    failure = running.run / "failure.json"
    failure.write_text("{}")
    steps, again = running.steps(), Running(running.run)
    again.await_steps(steps + 1)
    assert not failure.exists()
    again.process.send_signal(signal.SIGINT)
    again.end()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(running: Running) -> None:
    """The ranks are stopped, so that only a kill can end them: the first one waits for their step."""
    ranks = [e["pid"] for e in map(json.loads, (running.run / "events.jsonl").open()) if e["event"] == "started"]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    running.process.send_signal(signal.SIGINT)
    assert running.process.stdout is not None
    assert any("again: at once" in line for line in running.process.stdout)
    began = time.monotonic()
    for pid in ranks:  # the first Ctrl-C lets them go on, to finish their step
        os.kill(pid, signal.SIGSTOP)
    running.process.send_signal(signal.SIGINT)
    summary = running.end()
    assert (running.process.returncode, summary["status"]) == (130, "interrupted"), running.said
    assert time.monotonic() - began < 8 * busy()
    assert not running.checkpoints()


@pytest.mark.slow
def test_figures_that_a_lost_launcher_never_heard_reach_the_next_one(running: Running) -> None:
    """The launcher is frozen while ranks go on, then killed: what they did meanwhile is told when the run goes on."""
    os.kill(running.process.pid, signal.SIGUSR1)
    wait_for(running.checkpoints)
    os.kill(running.process.pid, signal.SIGSTOP)
    heard = running.steps()
    wait_for(lambda: (running.run / "launch" / "unheard.json").exists())  # the lease has lapsed
    running.process.kill()
    running.process.wait()
    again = Running(running.run)
    wait_for(lambda: running.steps() > heard + 1)
    again.process.send_signal(signal.SIGTERM)
    again.end()
    steps = [json.loads(line)["step"] for line in (running.run / "metrics.jsonl").open()]
    assert set(steps) == set(range(1, max(steps) + 1)), again.said
    assert not (running.run / "launch" / "unheard.json").exists()


@pytest.mark.slow
def test_ctrl_z_does_not_suspend_the_launcher(running: Running) -> None:
    running.process.send_signal(signal.SIGTSTP)
    running.await_steps(running.steps() + 2)
    running.process.send_signal(signal.SIGTERM)
    running.end()
    assert "not suspended" in running.said


@pytest.fixture
def group() -> Iterator[Path]:
    """A memory cgroup (version 1) of 700 MiB."""
    made = MEMORY / f"hetctl-{os.getpid()}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(700 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    wait_for(lambda: not (made / "cgroup.procs").read_text().split())
    made.rmdir()


def test_a_rank_that_eats_all_memory_is_named_so(group: Path, tmp_path: Path) -> None:
    (tmp_path / "hog.py").write_text(HOG)
    argv = [sys.executable, "-m", "hetctl", "run", "--emulate", "h200:1,mi325x:1", "--run-dir", "run", "--", "python"]
    enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", enter, "sh", *argv, "hog.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 1, done.stderr
    failure = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert failure["rank"] == 1
    assert "ran out of memory" in failure["reason"]
