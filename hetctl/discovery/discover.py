"""From an inventory to what every host says of itself: one round trip per host, all at once, an outcome for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.comm.contract.cluster import Access
from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.facts import HostFacts
from hetctl.discovery.fabric import Report
from hetctl.discovery.inventory import InventoryHost
from hetctl.launcher.engines.entrance import Entrance
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import HostOutcome, fan_out
from hetctl.launcher.hosts.shell import Finished, ShellError, run
from hetctl.probe import MAX_STDOUT_BYTES, Options, Raw, extract, parse, program
from hetctl.probe.capture import Recording, read_capture
from hetctl.probe.raw import UNSUPPORTED, printable

DEFAULT_TIMEOUT_S = 60.0
_MARGIN = 0.8  # of the deadline is the probe's; the rest is for the way there and back
_NO_SUCH_COMMAND = (126, 127)


@dataclass(frozen=True)
class HostAnswer:
    """A host's report, and its raw material for a capture (None when there is none)."""

    report: Report
    raw: Raw | None = None


def discover(
    entries: Sequence[InventoryHost],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    options: Callable[[InventoryHost], Options] | None = None,
    on_answer: Callable[[HostAnswer], None] = lambda answer: None,
    say: Callable[[str], None] = lambda said: None,
) -> list[HostAnswer]:
    """Ask all hosts at once; their answers in the inventory's order. `on_answer` sees each as it comes in.

    A host that fails is an answer like any other: its report has a status and a reason instead of facts. `say` hears
    what is waited for before any can be asked. Raises HetctlError where no host can be.
    """
    answers: dict[str, HostAnswer] = {}
    with Entrance() as entrance:
        entrance.check(entries, say=say)

        def ask(entry: InventoryHost, deadline: Deadline) -> HostAnswer:
            asked = options(entry) if options else Options(environment=tuple(entry.access.env))
            asked = replace(asked, interpreters=(*asked.interpreters, *dict.fromkeys(entry.access.pythons.values())))
            return ask_host(entry, entrance, _in_time(asked, timeout_s), deadline)

        for outcome in fan_out(entries, ask, deadline_s=timeout_s):
            answer = _answer(outcome)
            answers[outcome.item.name] = answer
            on_answer(answer)
    return [answers[entry.name] for entry in entries]


def recordings(answers: Sequence[HostAnswer]) -> list[Recording]:
    """The answers as a capture holds them, hosts that failed among them."""
    return [Recording(a.report.name, a.raw, a.report.status, a.report.reason, a.report.access.address) for a in answers]


def replay(path: Path) -> list[HostAnswer]:
    """The answers in a capture, parsed anew. Raises ConfigError when it is none."""
    return [
        HostAnswer(
            Report(
                name=one.name,
                access=Access(address=one.address),
                facts=parse(one.raw) if one.raw else None,
                status=one.status,
                reason=one.reason,
            ),
            one.raw,
        )
        for one in read_capture(path)
    ]


def ask_host(entry: InventoryHost, entrance: Entrance, options: Options, deadline: Deadline) -> HostAnswer:
    """What one host says. Raises HetctlError that says why it says nothing."""
    begin = time.monotonic()
    with closing(entrance.open(entry, deadline)) as shell:
        asked_at = time.time()
        finished = run(
            shell,
            [*entry.access.prefix, entry.access.python, "-I", "-"],
            deadline=deadline,
            stdin=program(options),
            max_bytes=MAX_STDOUT_BYTES,
        )
    answered_at = time.time()
    raw = _material(finished, entry.access.python)
    facts = _with_vendors(parse(raw), entry.access)
    report = Report(
        name=entry.name,
        access=entry.access,
        facts=facts,
        data_address=entry.data_address,
        slots=entry.slots,
        seconds=time.monotonic() - begin,
        clock_ahead_s=_clock_ahead(facts, asked_at, answered_at),
    )
    return HostAnswer(report, raw)


def _with_vendors(facts: HostFacts, access: Access) -> HostFacts:
    """The facts, whose Pythons know the vendors that the inventory names them for."""
    vendors = {path: tuple(v for v, p in access.pythons.items() if p == path) for path in access.pythons.values()}
    return replace(facts, interpreters=tuple(replace(p, vendors=vendors.get(p.path, ())) for p in facts.interpreters))


def _clock_ahead(facts: HostFacts, asked_at: float, answered_at: float) -> tuple[float, float] | None:
    """Bounds on how far a host's clock is ahead of ours: it was read after the probe's work and before its answer."""
    clock, worked = facts.system.clock_s, facts.system.probe_seconds
    if clock is None or worked is None:
        return None
    return clock - answered_at, clock - min(asked_at + worked, answered_at)


def _material(finished: Finished, python: str) -> Raw:
    try:
        return extract(finished.stdout)
    except HetctlError as error:
        said = printable(finished.stderr[-400:])
        if UNSUPPORTED in finished.stdout or "Unknown option: -I" in said:
            raise ShellError("python-unsupported", error.message, hint=error.hint) from None
        if finished.exit_code in _NO_SUCH_COMMAND:
            hint = "name a Python >= 3.8 of that host as `python` in the inventory"
            why = f"there is no '{python}' on the host ({said or 'exit code 127'})"
            raise ShellError("no-python", why, hint=hint) from None
        why = f"{error.message} (exit code {finished.exit_code}{': ' + said if said else ''})"
        raise ShellError("no-answer", why, hint=error.hint) from None


def _answer(outcome: HostOutcome[InventoryHost, HostAnswer]) -> HostAnswer:
    if outcome.value is not None:
        return outcome.value
    entry, error = outcome.item, outcome.error
    assert error is not None
    problem = error.problem if isinstance(error, ShellError) else "failed"
    return HostAnswer(
        Report(
            name=entry.name,
            access=entry.access,
            data_address=entry.data_address,
            status=problem,
            reason=printable(error.message, limit=400),
            hint=printable(error.hint, limit=400),
            seconds=outcome.seconds,
        )
    )


def _in_time(options: Options, timeout_s: float) -> Options:
    """The options with deadlines that end before ours does, so that a slow tool costs one value, not the host."""
    whole = min(options.deadline_s, timeout_s * _MARGIN)
    return replace(options, deadline_s=whole, tool_timeout_s=min(options.tool_timeout_s, whole * _MARGIN))
