"""Data to hosts that lack them: compared by digest, sent to a few hosts at a time, kept there for the next run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hetctl.comm.contract.errors import HetctlError
from hetctl.comm.contract.units import MiB, count_of, show_bytes
from hetctl.launcher.agent import bootstrap
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.hosts.host_names import fold
from hetctl.launcher.supervisor.agents import STARTING_S, TargetHost, begin_dialogue, expect, refusal
from hetctl.launcher.supervisor.console import Console

AT_ONCE = 4  # hosts that are sent to: more would share this machine's line
SLOWEST = MiB  # bytes per second; a host that takes less is given up


@dataclass(frozen=True)
class Shipment:
    """Files that go together to hosts. `path` is a folder, or what several in a folder are known by."""

    path: Path
    files: tuple[Path, ...]

    @cached_property
    def root(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def names(self) -> list[tuple[str, int]]:
        """(name under the root, bytes) of each."""
        return [(path.relative_to(self.root).as_posix(), path.stat().st_size) for path in self.files]

    @cached_property
    def bytes(self) -> int:
        return sum(size for _, size in self.names)


@dataclass(frozen=True)
class Placed:
    """Where a host has a shipment, and how much it now keeps of such, where it had to be sent."""

    path: str
    kept_bytes: int | None


def ship(targets: Sequence[TargetHost], shipments: Sequence[Shipment], console: Console) -> dict[str, dict[str, str]]:
    """Have every host hold the shipments. Returns per host where each lies: path here -> path there.

    Raises one error that names every host that did not take them.
    """
    places: dict[str, dict[str, str]] = {target.name: {} for target in targets}
    for one in shipments:
        for host, placed in _everywhere(targets, one, console).items():
            places[host][str(one.path)] = placed.path
    return places


def _everywhere(targets: Sequence[TargetHost], what: Shipment, console: Console) -> Mapping[str, Placed]:
    """One shipment on every host, and a line about it."""
    size, hosts = show_bytes(what.bytes), count_of(len(targets), "host")
    with console.trying(f"comparing {what.path} ({size}) with what {hosts} may have") as show:
        placed = _in_turn(targets, what, show)
    if sent_to := {name: one.kept_bytes for name, one in placed.items() if one.kept_bytes is not None}:
        most = show_bytes(max(sent_to.values()))
        console.say(f"sent {what.path} ({size}) to {fold(list(sent_to))}, kept in ~/.cache/hetctl/data ({most} by now)")
    return placed


def _in_turn(targets: Sequence[TargetHost], what: Shipment, show: Callable[[str], None]) -> dict[str, Placed]:
    """A few hosts at a time. Raises one error for all that failed."""
    digest, sent = bootstrap.digest_of(str(what.root), what.names), 0
    placed: dict[str, Placed] = {}
    errors: dict[str, HetctlError] = {}

    def count(taken: int) -> None:
        nonlocal sent
        sent += taken
        show(f"{show_bytes(sent)} sent")

    def work(target: TargetHost, deadline: Deadline) -> Placed:
        return _to_one(target, what, digest, deadline, count)

    for outcome in fan_out(targets, work, deadline_s=STARTING_S + what.bytes / SLOWEST, at_once=AT_ONCE):
        if outcome.value is not None:
            placed[outcome.item.name] = outcome.value
        elif outcome.error is not None:
            errors[outcome.item.name] = outcome.error
    if errors:
        raise refusal(errors, len(targets))
    return placed


def _to_one(
    target: TargetHost, what: Shipment, digest: str, deadline: Deadline, count: Callable[[int], None]
) -> Placed:
    """One shipment on one host. Raises HetctlError."""
    request = {"do": "take", "digest": digest, "files": what.names, "path": str(what.root)}
    with closing(target.open(deadline)) as shell:
        dialogue = begin_dialogue(target, shell, request, deadline)
        answer = expect(dialogue, "data", deadline)
        if answer["folder"] is None:
            deadline.phase = f"sending {what.path}"
            for path in what.files:
                with path.open("rb") as file:
                    while chunk := file.read(MiB):
                        dialogue.write(chunk, deadline=deadline)
                        count(len(chunk))
            answer = expect(dialogue, "data", deadline)
    return Placed(str(Path(answer["folder"], what.path.relative_to(what.root))), answer.get("kept_bytes"))
