"""Claims one after the other, each in its own process with a time limit: whatever one does, the next one is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError, Interrupted
from hetctl.comm.contract.values import decode
from hetctl.launcher.supervisor.launch import code_root
from hetctl.validate.claims import Claim, Judgement, Result, could_not_tell, not_applicable, with_silent_hosts
from hetctl.validate.ground import ClaimHosts, save_ground

_GRACE_S = 10.0  # between asking a claim's process to end, asking again, and ending it: its ranks end within this
_MOST_SAID = 400  # characters of the last line of a process that crashed


def run_claims(
    claims: Sequence[Claim],
    ground: ClaimHosts,
    folder: Path,
    *,
    on_begin: Callable[[Claim], None],
    on_end: Callable[[Result], None],
) -> list[Result]:
    """Judge each claim; evidence lands below `folder`/<claim>. Raises Interrupted when a signal asks to stop."""
    file = folder / "ground.json"
    save_ground(file, ground)
    results = []
    with _signals():
        for claim in claims:
            on_begin(claim)
            began = time.monotonic()
            why = claim.lacking(ground)
            outcome = not_applicable(why) if why else _in_own_process(claim, file, folder, ground.timeout_s)
            outcome = with_silent_hosts(claim, outcome, ground)
            results.append(Result(claim, outcome, time.monotonic() - began, _evidence(folder, claim)))
            on_end(results[-1])
    file.unlink()
    return results


def _in_own_process(claim: Claim, ground: Path, folder: Path, seconds: float) -> Judgement:
    below, answer = folder / claim.id, folder / f".{claim.id}.json"
    below.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "hetctl.validate.child", claim.id, str(ground), str(below), str(answer)]
    with (below / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=below,  # whatever leaves something where it stands leaves it there
            env=_environment(),
            start_new_session=True,
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(child)
            return could_not_tell(f"it did not end within {seconds:g} s (--timeout)")
        except BaseException:
            _end(child)
            raise
    return _outcome(answer, child.returncode, below / "log.txt")


def _outcome(answer: Path, code: int, log: Path) -> Judgement:
    try:
        found = decode(Judgement, json.loads(answer.read_text(encoding="utf-8")), where="outcome")
        answer.unlink()
        return found
    except (OSError, ValueError, ConfigError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return could_not_tell(f"its process ended with {how}: {lines[-1][-_MOST_SAID:]}")


def _environment() -> dict[str, str]:
    """Ours, with this very code on the path also where it is not installed."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(code_root()), *([inherited] if inherited else [])])
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1"}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask it to stop its ranks (twice: at once), then end its whole session."""
    for _ in range(2):
        with suppress(ProcessLookupError):
            child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
            return
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _evidence(folder: Path, claim: Claim) -> tuple[str, ...]:
    below = folder / claim.id
    return tuple(sorted(p.relative_to(folder).as_posix() for p in below.rglob("*") if p.is_file()))


@contextmanager
def _signals() -> Iterator[None]:
    """Ctrl-C, TERM or a closed terminal ends the claim that runs, and with it the command."""

    def stop(number: int, _: object) -> None:
        error = Interrupted("the validation was interrupted", hint="no bundle was written")
        error.exit_code = 128 + number
        raise error

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
