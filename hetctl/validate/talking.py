"""Claims about talking: native libraries inside islands, and each bridge between them: exact first, then how fast."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetctl.bench.bridge import bench_bridge, prove_islands, try_engines
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.errors import ConfigError, WorkFailed
from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.transports import TRANSPORTS
from hetctl.comm.contract.units import show_rate
from hetctl.console import Sink
from hetctl.launcher.supervisor.environment import Setting
from hetctl.validate.claims import Claim, Judgement, could_not_tell, does_not_hold, holds
from hetctl.validate.ground import ClaimHosts

QUICK_SIZE = "256KiB"  # the largest message under --quick
_LOGGING = Setting("NCCL_DEBUG", "INFO", "evidence of what the library chose; RCCL reads it too")
_REFUSED = "cannot be"  # what a forced bridge that is impossible is answered with


def lacks_group(ground: ClaimHosts) -> str:
    most = max((len(i.members) for i in ground.cluster.islands), default=0)
    return "" if most > 1 else "no island has two devices: there is nobody to talk to natively"


def check_islands(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
    """Every island's own library, on all of its ranks."""
    found = prove_islands(ground.cluster, sink=sink, settings=(_LOGGING,), keep=folder / "ranks")
    write_json(folder / "islands.json", found)
    wrong = [words for island in found for words in island["wrong"]]
    if wrong:
        return does_not_hold("; ".join(wrong[:4]), islands=found)
    if len(found) < len(ground.cluster.islands):
        return could_not_tell(f"only {len(found)} of {len(ground.cluster.islands)} islands reported", islands=found)
    words = [f"{i['name']}: {_libraries(i['libraries'])} over {i['ranks']} ranks" for i in found]
    return holds(f"sums are exact; {'; '.join(words)}", islands=found)


def _libraries(found: list[dict[str, str]]) -> str:
    return ", ".join(f"{one['library']} {one['version']}" for one in found)


def lacks_engine_ground(ground: ClaimHosts) -> str:
    return ground.lacking("rdma")


def lacks_device_ground(ground: ClaimHosts) -> str:
    """Emulated islands may ask for `direct`, but it is a peer copy there and shows nothing of NICs."""
    if ground.kind == "cpu":
        return "CPUs have no device memory"
    return lacks_engine_ground(ground) or ground.lacking("direct")


def check_engines(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
    """An engine of the direct bridge on every host: memory registers, and a transfer to itself arrives."""
    found = try_engines(ground.cluster, sink=sink, keep=folder / "ranks")
    write_json(folder / "engines.json", found)
    unable = {one["on"]: _why_no_engine(one) for one in found if not _able(one, "host")}
    if unable:
        return does_not_hold("; ".join(f"{host}: {why}" for host, why in unable.items()), hosts=found)
    devices = sum(bool(_able(one, "device")) for one in found)
    names = "; ".join(f"{one['on']}: {', '.join(_able(one, 'host'))}" for one in found)
    return holds(f"host memory on {len(found)} hosts ({names}), device memory on {devices} of them", hosts=found)


def _able(one: dict[str, Any], memory: str) -> list[str]:
    return [name for name, said in one["engines"].items() if not said[memory]]


def _why_no_engine(one: dict[str, Any]) -> str:
    return one["lacking"] or "; ".join(f"{name}: {said['host']}" for name, said in one["engines"].items())


def bridge_check(transport: str) -> Callable[[ClaimHosts, Path, Sink], Judgement]:
    """The check of one transport, over one pair of islands for each two vendors."""

    def check(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
        outcomes = [_over(transport, pair, ground, folder, sink) for pair in ground.pairs(transport)]
        figures = {name: o.figures for name, o in outcomes}
        for verdict in ("does not hold", "could not tell", "holds"):
            of_it = [(name, o) for name, o in outcomes if o.verdict == verdict]
            if of_it:
                says = "; ".join(f"{name}: {o.says}" for name, o in of_it)
                return Judgement(of_it[0][1].verdict, says, figures)
        return could_not_tell("no pair of islands can talk so", **figures)

    return check


def _over(transport: str, pair: Cluster, ground: ClaimHosts, folder: Path, sink: Sink) -> tuple[str, Judgement]:
    a, b = (i.name for i in pair.islands)
    below = folder / re.sub(r"[^A-Za-z0-9.-]+", "-", f"{a}-{b}")
    below.mkdir(parents=True, exist_ok=True)
    size = QUICK_SIZE if ground.quick else None
    try:
        found = bench_bridge(
            pair,
            bridge=transport,
            max_size=size,
            sink=sink,
            keep=below / "ranks",
        )
    except (ConfigError, WorkFailed) as error:
        said = f"{error.message} {error.hint}"
        if TRANSPORTS[transport].engine and f"{_REFUSED} {transport}" in said:
            return f"{a} - {b}", could_not_tell(f"refused, as it should be where it was not proved: {error.message}")
        raise
    write_json(below / "bench.json", found)
    return f"{a} - {b}", judge_bridge(transport, found)


def judge_bridge(transport: str, found: dict[str, Any]) -> Judgement:
    """A measurement's verdict: nothing wrong in it, and for device memory nothing staged."""
    way = found["ways"][transport]
    largest = max(way["message_bytes_per_s"], key=int)
    figures = {
        "device": found["device"],
        "exact": way["exact"],
        "largest_message_bytes": int(largest),
        "message_bytes_per_s": way["message_bytes_per_s"][largest],
        "all_reduce_bytes_per_s": way["all_reduce_bytes_per_s"][largest],
        "latency_s": way["latency_s"],
        "cpu_s_per_gb": way["cpu_s_per_gb"],
        "raw_bytes_per_s": found["raw_bytes_per_s"],
        "evidence": found["evidence"],
    }
    wrong = way["exact"]["wrong"]
    if wrong:
        return does_not_hold("; ".join(wrong[:4]), **figures)
    if TRANSPORTS[transport].engine:
        if not found["evidence"]:
            return could_not_tell("exact, but no engine told of its transfers", **figures)
        if why := _not_as_named(transport, found["evidence"]):
            return does_not_hold(why, **figures)
    rates = f"messages {show_rate(figures['message_bytes_per_s'])}, sums {show_rate(figures['all_reduce_bytes_per_s'])}"
    return holds(f"{way['exact']['sums']} sums and {way['exact']['messages']} messages are exact; {rates}", **figures)


def _not_as_named(transport: str, evidence: list[dict[str, Any]]) -> str:
    """What the engines' own accounts say against the transport's name, '' where nothing does."""
    ways = {way for one in evidence for way in one["ways"]}
    if transport not in ways:
        return f"the engines carried {', '.join(sorted(ways)) or 'nothing'}, not {transport}"
    staged = sum(one["staged_bytes"] for one in evidence)
    if transport == "direct" and ways == {"direct"} and staged:
        return f"{staged} bytes were staged in host memory"
    return ""


CLAIMS = (
    Claim(
        "native.islands",
        "Each island's native library (NCCL, RCCL; gloo on CPUs) comes up and sums exactly.",
        ("README.md", "library (NCCL, RCCL) inside its **islands**"),
        "an island of two devices or more",
        "sums of whole numbers over each island, in fp32 and fp64; the library that really ran says its version",
        lacks_group,
        check_islands,
    ),
    Claim(
        "bridge.shm",
        "The shared-memory bridge between two islands of one host is exact; its rates are given.",
        ("README.md", "bridge and pipeline speed"),
        "two islands on one host",
        "`hetctl bench bridge --bridge shm`, with sums and messages of whole numbers before",
        lambda ground: ground.lacking("shm"),
        bridge_check("shm"),
    ),
    Claim(
        "bridge.tcp",
        "The forwarded bridge over TCP is exact; its rates are given.",
        ("README.md", "bridge and pipeline speed"),
        "two islands that an IP network joins",
        "`hetctl bench bridge --bridge tcp`, with sums and messages of whole numbers before",
        lambda ground: ground.lacking("tcp"),
        bridge_check("tcp"),
    ),
    Claim(
        "engine.self-test",
        "An engine of the direct bridge registers memory with the NIC, and a transfer to itself arrives.",
        ("docs/bridge.md", "memory is registered and a transfer to itself must arrive"),
        "two hosts on one RDMA network, nixl or mooncake in their Python",
        "each engine in a process of its own on every host; host memory must, device memory is told",
        lacks_engine_ground,
        check_engines,
    ),
    Claim(
        "bridge.rdma",
        "The bridge over host-memory RDMA is exact, and an engine carried it.",
        ("README.md", "bridge over host-memory RDMA"),
        "two islands on one RDMA network, an engine on both",
        "`hetctl bench bridge --bridge rdma`; the engines' evidence and the ports' counters are kept",
        lambda ground: ground.lacking("rdma"),
        bridge_check("rdma"),
    ),
    Claim(
        "bridge.direct",
        "The device-direct bridge is exact, and nothing of it is staged in host memory.",
        ("README.md", "device-direct bridge"),
        "the same, and device memory that NICs can register",
        "`hetctl bench bridge --bridge direct`; refused is not wrong, but then nobody can tell",
        lacks_device_ground,
        bridge_check("direct"),
    ),
)
