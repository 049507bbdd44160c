"""A shell's line on many hosts at once: what each printed and how it ended, with hosts that said the same together."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hetctl.comm.contract.errors import ConfigError, HetctlError, Unreachable
from hetctl.comm.contract.units import KiB, show_bytes
from hetctl.console import Sink
from hetctl.discovery.inventory import InventoryHost
from hetctl.launcher.engines.entrance import Entrance
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.hosts.host_names import fold
from hetctl.launcher.hosts.shell import run
from hetctl.launcher.supervisor.agents import interpreter
from hetctl.probe.raw import printable, printable_lines

MAX_BYTES = 256 * KiB  # kept of what a host prints
_RULE = "-" * 15


class Named(Protocol):
    """What is of one host."""

    @property
    def name(self) -> str: ...


H = TypeVar("H", bound=Named)


@dataclass(frozen=True)
class HostOutput:
    """What a line came to on one host; without an exit code, `problem` says why."""

    name: str
    exit_code: int | None
    output: str
    problem: str = ""


def line_of(words: Sequence[str], entry: InventoryHost) -> str:
    """The line that words mean on a host: each given as it is, one alone read by the shell. Raises ConfigError.

    `python` is the host's configured one.
    """
    if not words:
        raise ConfigError("there is no command to run", hint="hetctl exec HOSTS -- command")
    if words[0] in ("python", "python3"):
        words = [interpreter(entry.access), *words[1:]]
    elif len(words) == 1:
        return words[0]
    return shlex.join(words)


def execute_line(
    entries: Sequence[InventoryHost],
    line: Callable[[InventoryHost], str],
    *,
    timeout_s: float,
    on_output: Callable[[HostOutput], None] = lambda output: None,
) -> list[HostOutput]:
    """Run each host's line at the same time; outcomes in the order of the hosts. `on_output` sees each as it comes."""
    found: dict[str, HostOutput] = {}
    with Entrance() as entrance:

        def work(entry: InventoryHost, deadline: Deadline) -> HostOutput:
            argv = [*entry.access.prefix, "sh", "-c", f"exec 2>&1; {line(entry)}"]
            with closing(entrance.open(entry, deadline)) as shell:
                done = run(shell, argv, deadline=deadline, max_bytes=MAX_BYTES, cut=True)
            cut = f"\n[cut after {show_bytes(MAX_BYTES)}]" if len(done.stdout) == MAX_BYTES else ""
            return HostOutput(entry.name, done.exit_code, printable_lines(done.stdout + done.stderr) + cut)

        for outcome in fan_out(entries, work, deadline_s=timeout_s):
            found[outcome.item.name] = outcome.value or HostOutput(outcome.item.name, None, "", _why_not(outcome.error))
            on_output(found[outcome.item.name])
    return [found[entry.name] for entry in entries]


def _why_not(error: HetctlError | None) -> str:
    assert error is not None
    return printable(error.message + (f" ({error.hint})" if error.hint else ""), limit=400)


def folded(hosts: Iterable[H], says: Callable[[H], str]) -> Iterator[tuple[str, int, str]]:
    """(folded names, how many, what) for each thing that is said of hosts; of some it is nothing."""
    names: dict[str, list[str]] = {}
    for one in hosts:
        names.setdefault(says(one), []).append(one.name)
    return ((fold(some), len(some), said) for said, some in names.items() if said)


def show_outputs(sink: Sink, outputs: Sequence[HostOutput]) -> None:
    """What they printed as `clush -b` shows it, then who failed and who was not reached."""
    for names, count, output in folded(outputs, lambda one: one.output):
        sink.say("\n".join([_RULE, f"{names} ({count})" if count > 1 else names, _RULE, output]))
    for names, _, why in folded(outputs, _what_is_wrong):
        sink.warn(f"{names}: {why}")


def _what_is_wrong(one: HostOutput) -> str:
    return one.problem or (f"exit code {one.exit_code}" if one.exit_code else "")


def exit_code_of(outputs: Sequence[HostOutput]) -> int:
    """4 where a host's command did not come to its end, 1 where one failed."""
    if any(one.exit_code is None for one in outputs):
        return Unreachable.exit_code
    return int(any(one.exit_code for one in outputs))
