"""This machine's shell: output, stdin, caps, deadlines, and nothing left behind."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from pathlib import Path

import pytest

from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.local import LocalShell
from hetctl.launcher.hosts.shell import MAX_STDERR_BYTES, Finished, ShellError, run
from tests.busy import busy

PYTHON = [sys.executable, "-I", "-"]


def python(source: str, *, seconds: float = 20.0, max_bytes: int = 1 << 20) -> Finished:
    return run(LocalShell(), PYTHON, deadline=Deadline(seconds), stdin=source.encode(), max_bytes=max_bytes)


def test_output_exit_code_and_both_streams() -> None:
    done = python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)")
    assert (done.exit_code, done.stdout, done.stderr) == (7, b"out\n", b"err\n")


def test_a_signal_is_a_negative_exit_code() -> None:
    assert python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)").exit_code == -9


def test_stdin_larger_than_any_pipe_while_output_flows_the_other_way() -> None:
    echo = "import sys\nwhile chunk := sys.stdin.buffer.read(4096): sys.stdout.buffer.write(chunk)"
    payload = os.urandom(1 << 20)
    done = run(LocalShell(), [sys.executable, "-c", echo], deadline=Deadline(20), stdin=payload, max_bytes=1 << 21)
    assert done.stdout == payload


def test_a_command_that_reads_nothing_does_no_harm() -> None:
    done = run(LocalShell(), ["true"], deadline=Deadline(20), stdin=b"x" * (1 << 20))
    assert done.exit_code == 0


def test_too_much_output_ends_it_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(ShellError) as caught:
        python("while True: print('x' * 100000)", max_bytes=1 << 20)
    assert caught.value.problem == "too-much-output"
    assert time.monotonic() - begin < 10 * busy()


def test_stderr_is_cut_and_never_fatal() -> None:
    done = python("import sys; sys.stderr.write('x' * 1000000)")
    assert len(done.stderr) == MAX_STDERR_BYTES


def test_the_deadline_kills_the_whole_group(tmp_path: Path) -> None:
    source = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(600)"
    )
    with pytest.raises(ShellError) as caught:
        run(LocalShell(), PYTHON, deadline=Deadline(2.0), stdin=source.encode())
    assert caught.value.problem == "timeout"
    assert _gone(int((tmp_path / "pid").read_text()))


def test_a_grandchild_that_holds_the_pipe_does_not_hold_us() -> None:
    source = (
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('done')"
    )
    begin = time.monotonic()
    assert python(source).stdout == b"done\n"
    assert time.monotonic() - begin < 10 * busy()


def test_what_is_closed_while_it_is_waited_for_reads_nobody_elses_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    session = LocalShell().start(["sleep", "9"], deadline=Deadline(20.0))
    number, (ours, theirs) = next(iter(session._open)), os.pipe()
    os.write(theirs, b"theirs")
    os.set_blocking(ours, False)

    class Closing:
        """By the time that the wait is over, a neighbour has the descriptor's number."""

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            monkeypatch.undo()
            session.close()
            os.dup2(ours, number)
            return [(number, select.POLLIN)]

    monkeypatch.setattr(session, "_poll", Closing())
    assert session.read(0.0) is None
    assert os.read(number, 9) == b"theirs"
    for fd in (ours, theirs, number):
        os.close(fd)


def test_who_reads_a_session_that_another_thread_closes_reads_its_end() -> None:
    session = LocalShell().start(["sleep", "9"], deadline=Deadline(20.0))
    closing = threading.Timer(0.2, session.close)
    closing.start()
    assert session.read(5.0) is None
    closing.join()
    assert (session.ended, session.exit_code) == (True, -9)


def test_no_such_command() -> None:
    with pytest.raises(ShellError) as caught:
        run(LocalShell(), ["no-such-program-here"], deadline=Deadline(5))
    assert caught.value.problem == "no-such-command"


def _gone(pid: int) -> bool:
    end = time.monotonic() + 5 * busy()
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_a_program_below_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run(LocalShell(), ["~/python", "-c", "print('~/a')"], deadline=Deadline(20.0))
    assert done.stdout == b"~/a\n"
