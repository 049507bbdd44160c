"""`hetctl bench ops --cluster`: each device class of a cluster measured on a host that has it, all in parallel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.table import Table

from hetctl.bench.ops import add_to_profile
from hetctl.bench.ranks import run_ranks
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster, Member
from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.errors import ConfigError, HetctlError, Interrupted, WorkFailed
from hetctl.comm.contract.plan import PlannedIsland
from hetctl.comm.contract.values import decode, encode
from hetctl.console import Sink
from hetctl.launcher.supervisor.environment import Seat, device_type
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.bench.grid import ClassToMeasure, ShapeToMeasure, grid
from hetctl.trainer.planning.over_shapes import LEAST, leave_one_out
from hetctl.trainer.planning.pools import base_class, seats
from hetctl.trainer.planning.precision import measured_in
from hetctl.trainer.planning.profile import ClassProfile

TRIED = 3  # hosts of a class: what ails so many ails the class


@dataclass
class Measured:
    """What has been found so far, by class."""

    entries: dict[str, dict[str, ClassProfile]] = field(default_factory=dict)  # by shape
    hosts: dict[str, str] = field(default_factory=dict)  # where
    failed: dict[str, str] = field(default_factory=dict)  # why

    def document(self, file: Path) -> dict[str, Any]:
        """As plain data, with how far each class's shapes are off what the others tell of them."""
        classes = {
            name: {
                "host": self.hosts[name],
                "leave_one_out": error_of(list(shapes.values())),
                "measured": [encode(entry) for entry in shapes.values()],
            }
            for name, shapes in self.entries.items()
        }
        return {"classes": classes, "failed": self.failed, "file": str(file)}


def bench_classes(
    cluster: Cluster, more: tuple[ShapeToMeasure, ...], *, output: Path, sink: Sink, precision: Precision | None = None
) -> Measured:
    """The grid of shapes, and `more`, on each class of a cluster; added to a profile, also what a measurement that
    failed or was interrupted had found until then. `precision`: otherwise what its jobs compute in. Raises
    ConfigError, Interrupted.
    """
    precision = measured_in(cluster, precision or "auto")
    places, found = places_of(cluster), Measured()
    if not places:
        raise ConfigError("the cluster has no device to measure on", hint="make its file by hetctl discover")
    try:
        while places:
            _one_turn(cluster, turn(places), places, found, more, precision, sink)
    finally:
        if entries := [e for shapes in found.entries.values() for e in shapes.values()]:
            add_to_profile(output, *entries)
    return found


def places_of(cluster: Cluster) -> dict[str, list[Member]]:
    """Class -> a device of it on each of the first hosts that have it. Labels of an emulation are what they run on.

    Raises ConfigError for hosts that nobody can enter: this machine would be measured in their place.
    """
    if cluster.source != "emulated" and (strangers := [h.name for h in cluster.hosts if h.access is None]):
        raise ConfigError(
            f"the cluster file does not say how '{strangers[0]}' is entered", hint="make it with `hetctl discover`"
        )
    places: dict[str, list[Member]] = {}
    for _, _, member, device in seats(cluster):
        emulated = cluster.source == "emulated"
        name = base_class(cluster, device.device_class).name if emulated else device.device_class
        mine = places.setdefault(name, [])
        if len(mine) < TRIED and member.host not in {m.host for m in mine}:
            mine.append(member)
    return places


def turn(places: Mapping[str, list[Member]]) -> dict[str, Member]:
    """Which classes are measured at once, each on its next host: one a host, since neighbours slow each other."""
    chosen: dict[str, Member] = {}
    for name, members in places.items():
        if members[0].host not in {m.host for m in chosen.values()}:
            chosen[name] = members[0]
    return chosen


def launch_of(cluster: Cluster, chosen: Mapping[str, Member]) -> Launch:
    """A rank for each class, which talks to no other."""
    ranks = tuple(Seat(rank, m.host, m.device) for rank, m in enumerate(chosen.values()))
    islands = tuple(
        PlannedIsland(name, cluster.device(member).vendor, (name,), "host", (rank,))
        for rank, (name, member) in enumerate(chosen.items())
    )
    return Launch(cluster, ranks, islands)


def _one_turn(
    cluster: Cluster,
    chosen: Mapping[str, Member],
    places: dict[str, list[Member]],
    found: Measured,
    more: tuple[ShapeToMeasure, ...],
    precision: Precision | None,
    sink: Sink,
) -> None:
    """Measure some classes; those that are through, one way or another, leave `places`."""
    asked = [replace(_asked(cluster, name, member, more), precision=precision) for name, member in chosen.items()]

    def on_figures(event: str, values: dict[str, Any]) -> None:
        name = values["device_class"]
        if event == "shape":
            said = "does not fit" if values["entry"] is None else "measured"
            where = f"{name} on {chosen[name].host}"
            sink.say(f"{where}: {values['shape']} {said} ({values['number']} of {values['of']})")
            if values["entry"] is not None:
                found.hosts[name] = chosen[name].host
                entry = decode(ClassProfile, values["entry"], where=where)
                found.entries.setdefault(name, {})[values["shape"]] = entry
        elif event == "ended":
            places.pop(name, None)
            if values["problem"] or name not in found.entries:
                found.failed[name] = values["problem"] or "no shape fits on it"

    try:
        files = {variables.BENCH_CLASSES: json.dumps([encode(one) for one in asked])}
        sink.say("measuring " + ", ".join(f"{name} on {member.host}" for name, member in chosen.items()))
        run_ranks(
            "hetctl.trainer.bench.classes", launch_of(cluster, chosen), on_figures, files=lambda _: files, sink=sink
        )
    except Interrupted:
        raise
    except HetctlError as error:
        _without(error, chosen, places, found, sink)
    else:
        for name in chosen.keys() & places.keys():  # it ended and said nothing
            del places[name]
            found.failed[name] = "its measurement ended without a result"


def _asked(cluster: Cluster, name: str, member: Member, more: tuple[ShapeToMeasure, ...]) -> ClassToMeasure:
    kind = device_type(cluster, [cluster.device(member).vendor])
    return ClassToMeasure(name, (*grid(kind), *more), len(cluster.host_by_name[member.host].devices))


def _without(
    error: HetctlError, chosen: Mapping[str, Member], places: dict[str, list[Member]], found: Measured, sink: Sink
) -> None:
    """After an error: classes whose hosts it names go on to their next host, if there is one; the others begin again.

    An error that names none of their hosts is everybody's.
    """
    left = {name: member.host for name, member in chosen.items() if name in places}
    blamed = {name: error.hosts[host] for name, host in left.items() if host in error.hosts}
    for name, why in (blamed or dict.fromkeys(left, error)).items():
        del places[name][0]
        if places[name]:
            sink.warn(f"{name} is measured on {places[name][0].host} instead of {left[name]}: {why.message}")
        else:
            del places[name]
            found.failed[name] = f"{left[name]}: {why.message}"


def error_of(entries: list[ClassProfile]) -> dict[str, float] | None:
    """How far the measured shapes are off what the others tell of them; None where they are too few to tell."""
    if len({(e.of, e.seq_len) for e in entries}) < LEAST:
        return None
    off = list(leave_one_out(entries).values())
    return {"mean": mean(off), "worst": max(off)}


def classes_table(found: Measured) -> Table:
    """What was measured where, and how well other shapes follow from it."""
    shown = Table("class", "host", "shapes", "other shapes: off, leave-one-out (worst)")
    for name, entries in found.entries.items():
        off = error_of(list(entries.values()))
        told = f"{off['mean']:.0%} ({off['worst']:.0%})".replace("%", " %") if off else "too few shapes to tell"
        shown.add_row(name, found.hosts[name], str(len(entries)), told)
    for name, why in found.failed.items():
        shown.add_row(name, "failed", "", why)
    return shown


def raise_unless_all(found: Measured) -> None:
    """The exit code. Raises WorkFailed that names each class which could not be measured."""
    if found.failed:
        lines = "".join(f"\n  {name}: {why}" for name, why in found.failed.items())
        count = len(found.entries.keys() | found.failed.keys())
        raise WorkFailed(f"{len(found.failed)} of {count} device classes failed:{lines}", documented=True)
