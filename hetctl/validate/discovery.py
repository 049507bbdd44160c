"""Discovery's values beside those of tools that it does not need: each vendor's second tool, and ibv_devinfo."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hetctl.comm.contract.facts import GpuFacts, HostFacts, NicFacts
from hetctl.console import Sink
from hetctl.probe.nics import parse_ibv_ports
from hetctl.probe.raw import Raw
from hetctl.probe.vendors import VENDORS
from hetctl.probe.words import integer, told
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.validate.claims import Judge, Judgement, Measure, could_not_tell, does_not_hold, holds
from hetctl.validate.ground import ClaimHosts, ask

IBV = "ibv_devinfo"
COMPARED = "compared.json"
_WHOLE = ("spx", "none", "disabled")  # what a GPU in one piece calls its partition mode
_SHOWN = 4  # of what disagrees, in a sentence

Rows = list[dict[str, Any]]  # a value each: where, what, ours, theirs (None: not told), and whether it agrees
Pairs = Mapping[str, tuple[object, object]]  # what -> as discovery and as the tool tells it
T = TypeVar("T")
U = TypeVar("U")


def lacks_gpus(ground: ClaimHosts) -> str:
    if any(f.gpus for f in ground.facts.values()):
        return ""
    strange = [s for f in ground.facts.values() for s in f.vendors.values() if s not in ("present", "absent")]
    return strange[0] if strange else "no GPU here"


def lacks_rdma(ground: ClaimHosts) -> str:
    return "" if any(n.rdma_device for f in ground.facts.values() for n in f.nics) else "no RDMA port here"


def compared(rows_of: Callable[[str, HostFacts, Raw], Rows]) -> Measure:
    """The values of all hosts, asked anew; what the tools printed is kept word for word."""

    def measure(ground: ClaimHosts, folder: Path, sink: Sink) -> Rows:
        rows: Rows = []
        for answer in ask(ground.entries, ground.timeout_s):
            if answer.raw is not None and answer.report.facts is not None:
                _keep_tools(folder / answer.report.name, answer.raw)
                rows += rows_of(answer.report.name, answer.report.facts, answer.raw)
        return rows

    return measure


def agreement(what: str, silence: str) -> Judge:
    """Whether all values that both know agree; `silence` says why there may be none."""

    def judge(rows: Rows, ground: ClaimHosts) -> Judgement:
        both = [r for r in rows if r["agrees"] is not None]
        wrong = [r for r in both if not r["agrees"]]
        figures = {"compared": len(both), "disagree": len(wrong), "not_told": len(rows) - len(both)}
        if wrong:
            words = (f"{r['where']}: {r['what']}: discover {r['ours']}, the tool {r['theirs']}" for r in wrong[:_SHOWN])
            return does_not_hold("; ".join(words), figures)
        if not both:
            return could_not_tell(silence, figures)
        return holds(f"{len(both)} values of {len({r['where'] for r in rows})} {what} agree", figures)

    return judge


def gpu_rows(host: str, facts: HostFacts, raw: Raw) -> Rows:
    """The values of a host's GPUs that both know; partitions of a GPU, functions of one PCI device, count once."""
    rows: Rows = []
    for vendor in VENDORS:
        mine = {_slot(g): g for g in reversed(facts.gpus) if g.vendor == vendor.name and g.pci}
        theirs = {_slot(g): g for g in reversed(vendor.opinion(raw) if vendor.opinion else ()) if g.pci}
        rows += _side_by_side(host, mine, theirs, "is a GPU", lambda gpu: gpu.id, _gpu_pairs)
    return rows


def nic_rows(host: str, facts: HostFacts, raw: Raw) -> Rows:
    """The values of a host's RDMA ports that both know."""
    mine = {_port(n): n for n in facts.nics if n.rdma_device}
    theirs = {f"{device}:{port}": said for (device, port), said in parse_ibv_ports(raw.tool(IBV).stdout).items()}
    return _side_by_side(host, mine, theirs, "is an RDMA port", _port, _nic_pairs)


def _side_by_side(
    host: str,
    mine: Mapping[str, T],
    theirs: Mapping[str, U],
    known: str,
    name: Callable[[T], str],
    pairs_of: Callable[[T, U], Pairs],
) -> Rows:
    """Rows of all things that either knows, or none where the tool knows of nothing at all."""
    rows: Rows = []
    for key in sorted(mine.keys() | theirs.keys() if theirs else ()):
        if key in mine and key in theirs:
            where, pairs = name(mine[key]), pairs_of(mine[key], theirs[key])
        else:
            where, pairs = key, {known: (key in mine, key in theirs)}
        rows += [_row(f"{host} {where}", what, *pair) for what, pair in pairs.items()]
    return rows


def _row(where: str, what: str, ours: object, theirs: object) -> dict[str, Any]:
    agrees = None if ours is None or theirs is None else _same(what, ours, theirs)
    return {"where": where, "what": what, "ours": ours, "theirs": theirs, "agrees": agrees}


def _same(what: str, ours: object, theirs: object) -> bool:
    if what == "memory" and isinstance(ours, int) and isinstance(theirs, int):
        return abs(ours - theirs) <= max(ours, theirs) // 100  # some tools leave out what firmware keeps
    words = [v.strip().lower() if isinstance(v, str) else v for v in (ours, theirs)]
    return words[0] == words[1]


def _slot(gpu: GpuFacts) -> str:
    return (gpu.pci or "").rpartition(".")[0]


def _port(nic: NicFacts) -> str:
    return f"{nic.rdma_device}:{nic.rdma_port}"


def _gpu_pairs(ours: GpuFacts, theirs: GpuFacts) -> Pairs:
    names = (ours.name, theirs.name)
    products = [CLASSES.of_gpu(g.vendor, g.names, g.pci_id, g.subsystem_id) for g in (ours, theirs)]
    if products[0] is not None and products[0] == products[1]:
        names = (ours.name, ours.name)  # two tools' words for one product
    whole = (ours.partition.mode or "spx") in _WHOLE
    return {
        "name": names,
        "uuid": (ours.uuid, theirs.uuid if whole else None),
        "serial": (ours.serial, theirs.serial),
        "memory": (ours.memory_total_bytes, theirs.memory_total_bytes if whole else None),
        "driver": (ours.driver, theirs.driver),
        "firmware": (ours.firmware, theirs.firmware),
        "PCIe width": (ours.pcie.max_width, theirs.pcie.max_width),
        "NUMA node": (ours.numa_node, theirs.numa_node),
        "partition": (ours.partition.mode, theirs.partition.mode),
    }


def _nic_pairs(ours: NicFacts, theirs: Mapping[str, str]) -> Pairs:
    state = re.match(r"PORT_(\w+)", theirs.get("state", ""))
    infiniband = ours.link_layer == "infiniband"
    return {
        "state": (ours.state, state.group(1).lower() if state else None),
        "link layer": (ours.link_layer, told(theirs.get("link_layer"))),
        "firmware": (ours.firmware, told(theirs.get("fw_ver"))),
        "node GUID": (ours.guid, told(theirs.get("node_guid"))),
        "lid": (ours.lid, integer(theirs.get("port_lid")) if infiniband else None),
        "sm_lid": (ours.sm_lid, integer(theirs.get("sm_lid")) if infiniband else None),
    }


def _keep_tools(folder: Path, raw: Raw) -> None:
    """What the tools printed, word for word: the next recorded case of a parser."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, output in raw.tools.items():
        if output.stdout.strip() or output.stderr.strip():
            text = f"$ {' '.join(output.argv)}  # exit code {output.exit_code}\n{output.stdout}\n{output.stderr}"
            (folder / (re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") + ".txt")).write_text(text, encoding="utf-8")
