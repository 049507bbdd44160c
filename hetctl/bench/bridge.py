"""`hetctl bench bridge`: start ranks on islands, let them measure every way between, show it in one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.table import Table

from hetctl.bench.ranks import run_ranks
from hetctl.comm.bridge.engines.base import PEER_COPY
from hetctl.comm.bridge.engines.shared import ENGINES, installed
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster, TransportKind
from hetctl.comm.contract.errors import ConfigError, WorkFailed
from hetctl.comm.contract.natives import HOST
from hetctl.comm.contract.transports import NATIVE, TRANSPORTS, carriers
from hetctl.comm.contract.units import GiB, MiB, parse_bytes, show_bytes, show_rate
from hetctl.console import Sink
from hetctl.launcher.supervisor.environment import Setting
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.planning.profile import BridgeProfile, SumPoint

LARGEST, LARGEST_OF_HOSTS = GiB, 4 * MiB  # where nothing is asked for


def bench_bridge(
    cluster: Cluster, *, bridge: str | None, max_size: str | None, sink: Sink, keep: Path | None = None
) -> dict[str, Any]:
    """Rates, latency and costs per transport, beside native and raw ways. Raises ConfigError or WorkFailed."""
    if len(cluster.islands) < 2:
        raise ConfigError("a bridge needs two islands", hint="--emulate h200:1,mi325x:1")
    transports = _transports(cluster, None if bridge == "auto" else bridge)
    kind = Launch.of(cluster).device_type
    most = parse_bytes(max_size) if max_size else (LARGEST_OF_HOSTS if kind == HOST else LARGEST)
    task = {
        "transports": transports,
        "max_bytes": most,
        "native": cluster.runs is not None and NATIVE not in transports and not cluster.shares_devices,
    }
    found = _measured(cluster, task, sink, keep=keep)
    about = {
        "device": kind,
        "islands": [len(i.members) for i in cluster.islands],
        "hosts": len(cluster.hosts),
        "transports": transports,
    }
    return about | found


def prove_islands(
    cluster: Cluster, *, sink: Sink, settings: Sequence[Setting] = (), keep: Path | None = None
) -> list[dict[str, Any]]:
    """Each island's native group made and summed over: `{name, ranks, sums, wrong, libraries}`. Raises WorkFailed."""
    task = {"transports": [], "max_bytes": 0, "native": False, "islands": True}
    found: list[dict[str, Any]] = _measured(cluster, task, sink, settings, keep=keep)["proved"]
    return sorted(found, key=lambda one: str(one["name"]))


def try_engines(cluster: Cluster, *, sink: Sink, keep: Path | None = None) -> list[dict[str, Any]]:
    """What the engines of the direct bridge say on each host: `{on, lacking, ports, engines}`. Raises WorkFailed."""
    task = {"transports": [], "max_bytes": 0, "native": False, "engines": True}
    found: list[dict[str, Any]] = _measured(cluster, task, sink, keep=keep)["tried"]
    return sorted(found, key=lambda one: str(one["on"]))


def _measured(
    cluster: Cluster, task: Mapping[str, Any], sink: Sink, settings: Sequence[Setting] = (), *, keep: Path | None = None
) -> dict[str, Any]:
    """One launch of the measuring program over all seats, and everything that its ranks reported."""
    found: dict[str, Any] = {"ways": {}, "proved": [], "tried": [], "evidence": []}

    def on_figures(name: str, values: dict[str, Any]) -> None:
        if name == "way":
            found["ways"][values["way"]] = figures = values["figures"]
            if TRANSPORTS[values["way"]].device_memory and cluster.runs is not None:
                figures["label"] = PEER_COPY
            right = figures["exact"]
            proved = "NOT exact" if right["wrong"] else f"{right['sums']} sums and {right['messages']} messages exact"
            sink.say(f"{values['way']}: {proved}, measured up to {show_bytes(task['max_bytes'])}")
        elif name == "result":
            found["raw_bytes_per_s"] = values["raw_bytes_per_s"]
        elif name == "island":
            found["proved"].append(values["island"])
        else:
            found["tried" if name == "engines" else "evidence"].append(values)

    run_ranks(
        "hetctl.comm.bench.measure",
        Launch.of(cluster),
        on_figures,
        files=lambda folder: {variables.MEASURE: json.dumps(task)},
        settings={s.name: s.value for s in settings},
        sink=sink,
        keep=keep,
    )
    if "raw_bytes_per_s" not in found:
        raise WorkFailed("the measurement ended without a result")
    return found


def _transports(cluster: Cluster, asked: str | None) -> list[TransportKind]:
    """What is measured: the transport asked for, else those that need no engine and every pair of islands has.

    Raises ConfigError where the one asked for is impossible as far as facts tell.
    """
    pairs = list(combinations((i.name for i in cluster.islands), 2))
    known: Sequence[TransportKind] = (*carriers(engine=False if cluster.runs == "gloo" else None), NATIVE)
    if asked is None:
        more: list[TransportKind] = [NATIVE]
        if cluster.runs is not None:
            # `native` is the yardstick anyway; a machine's own devices can be tried with each other by an engine
            more = [k for k in carriers() if TRANSPORTS[k].device_memory and any(map(installed, ENGINES))]
        tried = [*carriers(engine=False), *more]
        usable: list[TransportKind] = [t for t in tried if not any(_lacking(cluster, pair, t) for pair in pairs)]
        if not usable:
            raise ConfigError("no transport without an engine joins all these islands", hint="--bridge rdma")
        return usable
    if asked not in known:
        raise ConfigError(f"no bridge can be {asked} here", hint=f"--bridge {' or '.join(known)}")
    for pair in pairs:
        if why := _lacking(cluster, pair, asked):
            raise ConfigError(f"the bridge {' - '.join(pair)} cannot be {asked}: {why}")
    return [t for t in known if t == asked]


def _lacking(cluster: Cluster, pair: tuple[str, str], transport: str) -> str:
    """Why facts forbid a transport between two islands, '' where they do not."""
    link = cluster.link(*pair)
    way = next((t for t in link.transports if t.kind == transport), None) if link else None
    if way is None:
        return "nothing is known of it"
    return "" if way.usable else way.reason


def raise_unless_exact(found: Mapping[str, Any]) -> None:
    """Raise WorkFailed where a way carried or added wrongly: its rates are worth nothing then."""
    for name, figures in found["ways"].items():
        if wrong := figures["exact"]["wrong"]:
            raise WorkFailed(f"{name} is not exact: {wrong[0]}", hint="; ".join(wrong[1:4]), documented=True)


def bridge_table(found: Mapping[str, Any]) -> Table:
    """One row a size, one column a way for messages and for all-reduces; then latency, costs and raw ceilings."""
    ways = _named(found["ways"])
    table = Table("bytes", *(f"message, {n}" for n in ways), *(f"all-reduce, {n}" for n in ways))
    for size in next(iter(ways.values()))["message_bytes_per_s"]:
        cells = [show_rate(w[what][size]) for what in _RATES for w in ways.values()]
        table.add_row(show_bytes(int(size)), *cells)
    return table


def collectives_table(found: Mapping[str, Any]) -> Table:
    """The other collectives, one row a kind and size, one column a way."""
    ways = _named(found["ways"])
    table = Table("collective", "bytes", *ways)
    for name, sizes in next(iter(ways.values()))["collectives_bytes_per_s"].items():
        for size in sizes:
            cells = [show_rate(w["collectives_bytes_per_s"][name][size]) for w in ways.values()]
            table.add_row(name, show_bytes(int(size)), *cells)
    return table


def cost_table(found: Mapping[str, Any]) -> Table:
    """Latency and what 10^9 bytes cost, one row a way; raw ceilings below."""
    table = Table("way", "1 KiB p50", "1 KiB p99", "CPU s per GB", "host memory touched per GB", "held")
    for name, w in _named(found["ways"]).items():
        microseconds = [f"{w['latency_s'][q] * 1e6:.0f} us" for q in ("p50", "p99")]
        table.add_row(name, *microseconds, f"{w['cpu_s_per_gb']:.2f}", *(show_bytes(w[key]) for key in _MEMORY))
    for name, rate in found["raw_bytes_per_s"].items():
        table.add_row(f"raw: {name}", show_rate(rate), "", "", "", "")
    return table


def _named(ways: Mapping[str, Any]) -> dict[str, Any]:
    """By what people call them: `direct` says whether it was RDMA at all."""
    return {w.get("label", name): w for name, w in ways.items()}


def profiles_of(found: Mapping[str, Any]) -> list[BridgeProfile]:
    """What the planner wants to know of each transport: rates at the largest size, latency of the smallest.

    Not of the native library where it is but the yardstick, nor of peer copies (labelled so), which nothing plans.
    """
    entries = []
    for name, w in found["ways"].items():
        if name not in found["transports"] or "label" in w:
            continue
        largest = max(w["message_bytes_per_s"], key=int)
        rate = w["message_bytes_per_s"][largest]
        entries.append(BridgeProfile(name, rate, w["sums_bytes_per_s"], w["latency_s"]["p50"]))
    return entries


def native_sums_of(found: Mapping[str, Any]) -> tuple[SumPoint, ...]:
    """What the native library's sums took between two devices of a host, where that was measured."""
    native = found["ways"].get("native", {}) if (found["islands"], found["hosts"]) == ([1, 1], 1) else {}
    seconds = native.get("all_reduce_s", {})
    return tuple(SumPoint(int(size), seconds[size]) for size in sorted(seconds, key=int))


_MEMORY = ("host_bytes_per_gb", "host_bytes_held")
_RATES = ("message_bytes_per_s", "all_reduce_bytes_per_s")
