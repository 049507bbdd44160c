"""Claims one after the other, each in its own process with a time limit: whatever one does, the next one is judged."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from hetctl.comm.contract.errors import Interrupted
from hetctl.console import Sink
from hetctl.validate.claims import Claim, Judgement, Result, could_not_tell, not_applicable, with_silent_hosts
from hetctl.validate.ground import ClaimHosts
from hetctl.validate.table import BY_ID

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
    results = []
    with _signals():
        for claim in claims:
            on_begin(claim)
            began, below = time.monotonic(), folder / claim.id
            why = claim.lacking(ground)
            outcome = not_applicable(why) if why else _in_own_process(claim, ground, below)
            evidence = tuple(sorted(p.relative_to(folder).as_posix() for p in below.rglob("*") if p.is_file()))
            outcome = with_silent_hosts(claim, outcome, ground)
            results.append(Result(claim, outcome, time.monotonic() - began, evidence))
            on_end(results[-1])
    return results


def _in_own_process(claim: Claim, ground: ClaimHosts, folder: Path) -> Judgement:
    folder.mkdir(parents=True)
    log = folder / "log.txt"
    log.touch()
    context = get_context("spawn")
    answer, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_judge, args=(claim.id, ground, log, theirs))
    answered = False
    try:
        child.start()
        theirs.close()  # half an answer is then seen to end
        in_time = wait([answer, child.sentinel], ground.timeout_s)
        with suppress(EOFError):
            if answer.poll():
                found: Judgement = answer.recv()
                answered = True
                return found
        if not in_time:
            return could_not_tell(f"it did not end within {ground.timeout_s:g} s (--timeout)")
        child.join(_GRACE_S)
        return could_not_tell(f"its process ended with {_last_words(child.exitcode or 0, log)}")
    finally:
        _end(child, answered=answered)


def _judge(identity: str, ground: ClaimHosts, log: Path, answer: Connection) -> None:
    """In the claim's own process: what it prints is its log, and what it leaves where it stands is evidence."""
    os.setsid()
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.chdir(log.parent)
    os.environ["NO_COLOR"] = "1"
    sink = Sink(as_json=True)  # people's words to stderr, as they come
    answer.send(BY_ID[identity].check(ground, log.parent, sink))


def _last_words(code: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    return f"{f'signal {-code}' if code < 0 else f'exit code {code}'}: {lines[-1][-_MOST_SAID:]}"


def _end(child: SpawnProcess, *, answered: bool) -> None:
    """Ask it to stop its ranks (twice: at once) unless it has answered, then end its whole session."""
    if child.pid is None:
        return
    for _ in range(2):
        if not answered:
            child.terminate()
        child.join(_GRACE_S)
        if not child.is_alive():
            return
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()


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
