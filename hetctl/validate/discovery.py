"""Claims about reading: discovery agrees with the vendors' own tools, and the doctor can read RDMA ports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.contract.facts import GpuFacts, NicFacts
from hetctl.comm.contract.files import write_json
from hetctl.console import Sink
from hetctl.discovery.discover import HostAnswer
from hetctl.discovery.inventory import Inventory
from hetctl.doctor.registry import choose
from hetctl.doctor.runner import examine
from hetctl.doctor.tables import document
from hetctl.probe.nics import parse_ibv_ports
from hetctl.probe.raw import Raw
from hetctl.probe.vendors import VENDORS
from hetctl.probe.words import integer, told
from hetctl.trainer.planning.hardware import class_of_product
from hetctl.validate.claims import Claim, Judgement, could_not_tell, does_not_hold, holds
from hetctl.validate.ground import ClaimHosts, about

IBV = "ibv_devinfo"
COMPARED = "compared.json"
_WHOLE = ("spx", "none", "disabled")  # what a GPU in one piece calls its partition mode
_SHOWN = 4  # of what disagrees, in a sentence


@dataclass(frozen=True)
class Row:
    """One value as discovery and a tool tell it; None where one of them does not."""

    where: str
    what: str
    ours: object
    theirs: object

    @property
    def told(self) -> bool:
        return self.ours is not None and self.theirs is not None

    @property
    def agrees(self) -> bool:
        ours, theirs = (v.strip().lower() if isinstance(v, str) else v for v in (self.ours, self.theirs))
        if self.what == "memory" and isinstance(ours, int) and isinstance(theirs, int):
            return abs(ours - theirs) <= max(ours, theirs) // 100  # some tools leave out what firmware keeps
        return bool(ours == theirs)

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: discover {self.ours}, the tool {self.theirs}"


def lacks_gpus(ground: ClaimHosts) -> str:
    if any(f.gpus for f in ground.facts.values()):
        return ""
    strange = [s for f in ground.facts.values() for s in f.vendors.values() if s not in ("present", "absent")]
    return strange[0] if strange else "no GPU here"


def lacks_rdma(ground: ClaimHosts) -> str:
    return "" if any(n.rdma_device for f in ground.facts.values() for n in f.nics) else "no RDMA port here"


def check_gpus(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
    """Every GPU against a tool of its vendor that discovery does not need."""
    return _verdict(_rows(ground, folder, gpu_rows), "GPUs", "the vendor's second tool gave no answer")


def check_nics(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
    """Every RDMA port, which discovery reads from sysfs, against ibv_devinfo."""
    return _verdict(_rows(ground, folder, nic_rows), "RDMA ports", f"{IBV} gave no answer (package ibverbs-utils)")


def check_doctor(ground: ClaimHosts, folder: Path, sink: Sink) -> Judgement:
    """The doctor's RDMA checks on these ports; what it says of them is for a person to compare with the truth."""
    checks = choose(level="quick", only=["rdma", "roce"])
    found = examine(Inventory(ground.entries, "validation"), checks, timeout_s=min(60.0, ground.timeout_s))
    write_json(folder / "findings.json", document(found, level="quick"))
    unread = [f for f in found.findings if f.state == "unknown"]
    states = {s: sum(f.state == s for f in found.findings) for s in ("ok", "warn", "fail", "unknown")}
    for finding in found.findings:
        sink.say(f"{finding.state} {finding.check} {finding.host}: {finding.reason}")
    if unread:
        words = "; ".join(f"{f.host}: {f.check}: {f.reason}" for f in unread[:_SHOWN])
        return could_not_tell(f"{len(unread)} findings are unknown: {words}", states=states)
    return holds(f"{len(found.findings)} findings, none unknown; compare them with what you know", states=states)


def gpu_rows(host: str, answer: HostAnswer, raw: Raw) -> list[Row]:
    """The values of a host's GPUs that both know; partitions of a GPU, functions of one PCI device, count once."""
    assert answer.report.facts is not None
    rows: list[Row] = []
    for vendor in VENDORS:
        mine = {_slot(g): g for g in reversed(answer.report.facts.gpus) if g.vendor == vendor.name and g.pci}
        theirs = {_slot(g): g for g in reversed(vendor.opinion(raw) if vendor.opinion else ()) if g.pci}
        for slot in sorted(mine.keys() | theirs.keys() if theirs else ()):
            ours, other = mine.get(slot), theirs.get(slot)
            if ours is None or other is None:
                rows.append(Row(f"{host} {slot}", "is a GPU", ours is not None, other is not None))
            else:
                rows += _gpu_values(f"{host} {ours.id}", ours, other)
    return rows


def _slot(gpu: GpuFacts) -> str:
    return (gpu.pci or "").rpartition(".")[0]


def _gpu_values(where: str, ours: GpuFacts, theirs: GpuFacts) -> Iterable[Row]:
    names = (ours.name, theirs.name)
    products = [class_of_product(g.vendor, g.name) if g.name else None for g in (ours, theirs)]
    if products[0] is not None and products[0] == products[1]:
        names = (ours.name, ours.name)  # two tools' words for one product
    whole = (ours.partition.mode or "spx") in _WHOLE
    pairs: dict[str, tuple[object, object]] = {
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
    return [Row(where, what, *pair) for what, pair in pairs.items()]


def nic_rows(host: str, answer: HostAnswer, raw: Raw) -> list[Row]:
    """The values of a host's RDMA ports that both know."""
    assert answer.report.facts is not None
    mine = {(n.rdma_device, n.rdma_port): n for n in answer.report.facts.nics if n.rdma_device}
    theirs = parse_ibv_ports(raw.tool(IBV).stdout)
    rows: list[Row] = []
    for key in sorted(set(mine) | set(theirs) if theirs else (), key=str):
        where = f"{host} {key[0]}:{key[1]}"
        if key not in mine or key not in theirs:
            rows.append(Row(where, "is an RDMA port", key in mine, key in theirs))
        else:
            rows += _nic_values(where, mine[key], theirs[key])
    return rows


def _nic_values(where: str, ours: NicFacts, theirs: Mapping[str, str]) -> Iterable[Row]:
    state = re.match(r"PORT_(\w+)", theirs.get("state", ""))
    infiniband = ours.link_layer == "infiniband"
    pairs = {
        "state": (ours.state, state.group(1).lower() if state else None),
        "link layer": (ours.link_layer, told(theirs.get("link_layer"))),
        "firmware": (ours.firmware, told(theirs.get("fw_ver"))),
        "node GUID": (ours.guid, told(theirs.get("node_guid"))),
        "lid": (ours.lid, integer(theirs.get("port_lid")) if infiniband else None),
        "sm_lid": (ours.sm_lid, integer(theirs.get("sm_lid")) if infiniband else None),
    }
    return [Row(where, what, *pair) for what, pair in pairs.items()]


def _rows(ground: ClaimHosts, folder: Path, compare: object) -> list[Row]:
    rows: list[Row] = []
    for answer in ground.ask(lambda entry: about(entry, ground.timeout_s)):
        if answer.raw is not None and answer.report.facts is not None:
            _keep_tools(folder / answer.report.name, answer.raw)
            rows += compare(answer.report.name, answer, answer.raw)  # type: ignore[operator]
    write_json(folder / COMPARED, [vars(r) | {"agrees": r.agrees if r.told else None} for r in rows])
    return rows


def _keep_tools(folder: Path, raw: Raw) -> None:
    """What the tools printed, word for word: the next recorded case of a parser."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, output in raw.tools.items():
        if output.stdout.strip() or output.stderr.strip():
            text = f"$ {' '.join(output.argv)}  # exit code {output.exit_code}\n{output.stdout}\n{output.stderr}"
            (folder / (re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-") + ".txt")).write_text(text, encoding="utf-8")


def _verdict(rows: list[Row], what: str, silence: str) -> Judgement:
    compared = [r for r in rows if r.told]
    wrong = [r for r in compared if not r.agrees]
    figures = {"compared": len(compared), "disagree": len(wrong), "not_told": len(rows) - len(compared)}
    if wrong:
        return does_not_hold("; ".join(map(str, wrong[:_SHOWN])), **figures)
    if not compared:
        return could_not_tell(silence, **figures)
    count = len({r.where for r in rows})
    return holds(f"{len(compared)} values of {count} {what} agree", **figures)


CLAIMS = (
    Claim(
        "discovery.gpus",
        "What `discover` says of each GPU is what a further tool of its vendor says.",
        ("README.md", "AMD GPUs, InfiniBand and RoCE NICs"),
        "a GPU, and nvidia-smi or rocm-smi",
        "each value that both know: product, UUID, serial, memory, driver, firmware, PCIe width, NUMA node, partition",
        lacks_gpus,
        check_gpus,
        every_host=True,
    ),
    Claim(
        "discovery.nics",
        "What `discover` says of each RDMA port is what ibv_devinfo says.",
        ("README.md", "AMD GPUs, InfiniBand and RoCE NICs"),
        "an RDMA port, and ibv_devinfo",
        "each value that both know: state, link layer, firmware, node GUID, on InfiniBand the lids",
        lacks_rdma,
        check_nics,
        every_host=True,
    ),
    Claim(
        "doctor.rdma",
        "The doctor's RDMA checks read real ports: none of their findings is unknown.",
        ("README.md", "the doctor's RDMA checks"),
        "an RDMA port",
        "`hetctl doctor --only rdma,roce` on every host",
        lacks_rdma,
        check_doctor,
        every_host=True,
    ),
)
