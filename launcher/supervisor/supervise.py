"""Once ranks are specified: see them through, and record what failed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetctl.comm.contract.errors import WorkFailed
from hetctl.comm.contract.events import (
    Begin,
    Done,
    Exited,
    Failing,
    Gone,
    LogText,
    Lost,
    PeerUnreachable,
    PortChanged,
    RankFailed,
    Sampled,
    Saved,
    Started,
    StoreLost,
    Told,
    document,
)
from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.units import count_of
from hetctl.launcher.agent.orders import Prepare
from hetctl.launcher.agent.run_files import sweep
from hetctl.launcher.run_folder.failure import failed_all_the_same, find_failure
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.run_folder.registry import OnFile
from hetctl.launcher.supervisor.agents import Agents
from hetctl.launcher.supervisor.supervisor import LEASE_S, RunOutcome, Supervisor

# kept in events.jsonl
_ENDS = (Exited, Failing, RankFailed, PeerUnreachable, StoreLost, Lost, Gone, Done)
KEPT = (Started, Begin, Saved, Sampled, PortChanged, *_ENDS)
MAX_LOG_BYTES = 64 << 20  # of one rank's log that is kept here when it lives on another host


def supervise(
    agents: Agents,
    specs: Mapping[str, Prepare],
    on_event: Callable[[Told], None],
    *,
    place: OnFile,
    say: Callable[[str], None],
) -> RunOutcome:
    """Run the hosts' agents to their end; Ctrl-C or TERM stops the ranks, a second one at once.

    USR1 has the ranks save and go on, USR2 save and end. That a rank failed is said as soon as it is known.
    """
    folder = place.folder
    folder.cut_torn_lines()
    folder.failure.unlink(missing_ok=True)  # of an earlier attempt; this one may be lost before it says how it ended

    def handle(told: Told) -> None:
        match told.event:
            case LogText() as event:
                _keep_log(folder.log(told.source), event)
            case RankFailed():  # why comes once, at the end, from all exits
                say(f"rank {told.source} on {told.host} failed; the other ranks are ended")
            case PortChanged(nic, problem):
                say(f"{told.host}: {nic} is {problem or 'as it was again'}")
        if isinstance(told.event, KEPT):
            folder.append_event(_record(told))
        on_event(told)

    supervisor = Supervisor(agents, specs, handle)
    place.left = True
    try:
        with _signals(supervisor, say):
            outcome = supervisor.run()
    except WorkFailed:
        place.left = not all(link.finished for link in agents.links)
        raise
    place.left = not outcome.clear
    if outcome.clear:
        sweep(folder.half_made)  # where hosts keep their own files, their agents did
    return outcome


def record_failure(
    folder: RunFolder, outcome: RunOutcome, hosts: Sequence[str], sites: Sequence[Any] = ()
) -> dict[str, Any] | None:
    """What failed first, also written to failure.json; None (and no such file) when nothing did.

    Of a run that was interrupted that is what ranks could not do at its end, which is to save.
    """
    exits = failed_all_the_same(outcome.exits, outcome.errors) if outcome.interrupted else outcome.exits
    failure = find_failure(exits, hosts, outcome.errors)
    if failure is None:
        folder.failure.unlink(missing_ok=True)
        return None
    record = {
        **asdict(failure),
        "log": str(folder.log(failure.rank)),
        "waiting": {str(rank): operations for rank, operations in sorted(outcome.pending.items())[:64]},
        "lost_hosts": outcome.lost,
        "processes_left": outcome.left,
        "unverified_hosts": outcome.unverified,
    }
    for site in (s for s in sites if s.name == failure.host and not s.shared):
        record["log_on_host"] = str(site.folder.log(failure.rank))
    with suppress(OSError):  # a full disk may be what failed: it is said all the same
        write_json(folder.failure, record, private=True)  # it quotes what a rank printed
    return record


def left_sentence(outcome: RunOutcome) -> str:
    """The last line of a run: whether anything of it is still there."""
    if outcome.unverified:
        hosts = ", ".join(outcome.unverified)
        return f"{hosts} could not say what is left; its ranks end when the lease lapses (`hetctl clean` verifies it)"
    left = count_of(outcome.left, "process", "processes")
    return f"still there: {left}" if outcome.left else "nothing of the run is left running"


def _record(told: Told) -> dict[str, Any]:
    """An event as events.jsonl keeps it; what failing ranks wrote stands in failure.json, versions in versions.json."""
    plain = {k: v for k, v in document(told.event).items() if k not in ("error", "pending", "said", "versions")}
    return {**plain, "host": told.host, **({} if told.rank is None else {"rank": told.rank})}


def _keep_log(path: Path, event: LogText) -> None:
    """Add to the log of a rank whose host's files are not seen here, as its agent passes it on; bounded."""
    path.parent.mkdir(mode=0o700, exist_ok=True)  # what ranks print may hold secrets
    skipped = f"\n[{event.skipped} bytes are only in the log on the host]\n" if event.skipped else ""
    with path.open("ab") as file:
        if file.tell() < MAX_LOG_BYTES:
            file.write((skipped + event.text).encode())


@contextmanager
def _signals(supervisor: Supervisor, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C, TERM or a closed terminal once: stop in order. Twice: at once. USR1: save, USR2: save and end.

    Ctrl-Z does nothing: a launcher that is suspended would lose its hosts with the lease.
    """

    def stop(number: int, _: object) -> None:
        supervisor.outcome.signal = supervisor.outcome.signal or number
        again = supervisor.outcome.interrupted
        say("ending the ranks at once" if again else "stopping: the ranks finish their step and save (again: at once)")
        supervisor.stop()

    def save(number: int, _: object) -> None:
        end = number == signal.SIGUSR2
        told = supervisor.save(then_end=end)
        say(("saving, then ending" if end else "saving") if told else "the ranks have not begun: nothing to save yet")

    def stay(*_: object) -> None:
        say(f"not suspended: the hosts would end the run after {LEASE_S:.0f} s without its launcher (see --detach)")

    handlers: dict[int, Callable[[int, Any], None]] = {
        signal.SIGINT: stop,
        signal.SIGTERM: stop,
        signal.SIGHUP: stop,
        signal.SIGTSTP: stay,
        signal.SIGUSR1: save,
        signal.SIGUSR2: save,
    }
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup: it shall outlive its terminal
        del handlers[signal.SIGHUP]
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
