"""What `amd-smi --json`, `rocm-smi --json` and the KFD topology in sysfs say, over the ROCm generations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetctl.comm.contract.errors import Undetermined
from hetctl.comm.contract.facts import GpuFacts, Health, Partition, Pcie, Process
from hetctl.probe.raw import Raw
from hetctl.probe.words import (
    PCIE_GENERATIONS,
    count,
    gt_per_s,
    integer,
    items,
    json_documents,
    key_values,
    mapping,
    node,
    number,
    pci_address,
    pci_id,
    serial,
    size,
    told,
)

NAME, PCI_VENDOR = "amd", "0x1002"
KFD = "/sys/class/kfd/kfd/topology/nodes/"
_CODE = re.compile(r"0x[0-9a-fA-F]+|\d[\w-]*|[A-Z]\d{5,}\w*")
XGMI = 11  # HSA_IOLINK_TYPE_XGMI; 2 is PCIe


@dataclass(frozen=True)
class KfdNode:
    """One GPU node of the KFD topology; node order is the order in which the runtime counts devices."""

    number: int
    architecture: str | None = None
    pci: str | None = None
    unique_id: str | None = None  # 16 hexadecimal digits
    memory_total_bytes: int | None = None
    xgmi: tuple[int, ...] = ()  # nodes reached over xGMI
    partition: int | None = None  # which part of its package; None for the first, and for a whole one

    @property
    def uuid(self) -> str | None:
        return f"GPU-{self.unique_id}" if self.unique_id else None


def kfd_nodes(raw: Raw, *, pci_vendor: str = PCI_VENDOR) -> tuple[KfdNode, ...]:
    """The GPU nodes that this user may see (a container's device filter hides the others' files), of one vendor."""
    numbers = {path[len(KFD) :].split("/")[0] for path in raw.files if path.startswith(KFD)}
    found = [_kfd_node(raw, int(n), pci_vendor) for n in numbers if n.isdecimal() and len(n) < 6 and n.isascii()]
    return tuple(sorted((n for n in found if n), key=lambda n: n.number))


def _kfd_node(raw: Raw, number_: int, pci_vendor: str) -> KfdNode | None:
    base = f"{KFD}{number_}/"
    properties = _properties(raw.files.get(base + "properties", ""))
    if not integer(raw.text(base + "gpu_id")) or not properties.get("simd_count"):
        return None  # a CPU node, or one that is hidden from us
    if properties.get("vendor_id", int(PCI_VENDOR, 16)) != int(pci_vendor, 16):
        return None  # other vendors' drivers took the topology over from AMD's
    unique, place = properties.get("unique_id"), _kfd_place(properties)
    return KfdNode(
        number=number_,
        architecture=gfx_name(properties.get("gfx_target_version")),
        pci=place[0] if place else None,
        partition=place[1] if place else None,
        unique_id=f"{unique:016x}" if unique else None,
        memory_total_bytes=_kfd_memory(raw, base),
        xgmi=_kfd_xgmi(raw, base),
    )


def gfx_name(version: int | None) -> str | None:
    """gfx942 of KFD's 90402: major x 10000 + minor x 100 + stepping, the last two written in hexadecimal."""
    if not version or not 10000 <= version < 10**6:
        return None
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _kfd_place(properties: Mapping[str, int]) -> tuple[str, int | None] | None:
    """(PCI address, partition): kernels write the partition over the function, newer ones into bits 31:28."""
    domain, location = properties.get("domain", 0), properties.get("location_id")
    if location is None or not 0 <= location < 2**32 or not 0 <= domain < 2**32 or location >> 16 & 0xFFF:
        return None
    address = f"{domain:04x}:{location >> 8 & 255:02x}:{location >> 3 & 31:02x}.{location & 7}"
    return address, location >> 28 or location & 7 or None


def _kfd_memory(raw: Raw, base: str) -> int | None:
    banks = (_properties(raw.files[p]) for p in raw.files if p.startswith(base + "mem_banks/"))
    sizes = [b.get("size_in_bytes", 0) for b in banks if b.get("heap_type") in (1, 2)]  # public, private frame buffer
    return sum(sizes) or None


def _kfd_xgmi(raw: Raw, base: str) -> tuple[int, ...]:
    links = (_properties(raw.files[p]) for p in raw.files if p.startswith(base + "io_links/"))
    return tuple(sorted(link["node_to"] for link in links if link.get("type") == XGMI and "node_to" in link))


def _properties(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {p[0]: v for p in pairs if len(p) == 2 and (v := count(p[1])) is not None}


def parse_static(text: str) -> tuple[GpuFacts, ...]:
    """`amd-smi static --json`: a list up to ROCm 6, under `gpu_data` after; values plain or with a unit.

    Raises Undetermined when the output holds no such document.
    """
    return tuple(_static(entry, index) for index, entry in enumerate(_entries(text, what="amd-smi static")))


def _static(entry: Mapping[str, Any], index: int) -> GpuFacts:
    asic, board, bus = (mapping(entry.get(k)) for k in ("asic", "board", "bus"))
    parts, driver = mapping(entry.get("partition")), mapping(entry.get("driver"))
    best = gt_per_s(bus.get("max_pcie_speed"))
    firmware = mapping(entry.get("ifwi")) or mapping(entry.get("vbios"))
    limit = mapping(entry.get("limit"))
    package = mapping(limit.get("ppt0")) or limit  # since ROCm 7.1
    return GpuFacts(
        vendor=NAME,
        index=_index(entry, index),
        **names(board.get("product_name"), asic.get("market_name")),
        pci_id=pci_id(asic.get("vendor_id"), asic.get("device_id")),
        subsystem_id=pci_id(asic.get("subvendor_id"), asic.get("subsystem_id")),
        architecture=told(asic.get("target_graphics_version")),
        memory_total_bytes=size(mapping(entry.get("vram")).get("size"), unit="MB"),
        uuid=_unique(asic.get("asic_serial")),
        serial=serial(board.get("product_serial")),
        pci=pci_address(bus.get("bdf")),
        numa_node=node(mapping(entry.get("numa")).get("node")),
        pcie=Pcie(max_width=count(bus.get("max_pcie_width")) or None, max_speed_gt_per_s=best or _generation(bus)),
        partition=Partition(
            mode=_mode(parts.get("accelerator_partition")) or _mode(parts.get("compute_partition")),
            memory_mode=_mode(parts.get("memory_partition")),
        ),
        driver=told(driver.get("version")) or told(driver.get("driver_version")),
        firmware=told(firmware.get("version")),
        health=Health(power_limit_w=number(package.get("socket_power_limit")) or number(limit.get("max_power"))),
    )


@dataclass(frozen=True)
class Metric:
    """What changes while the machine runs, of one GPU."""

    index: int
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    width: int | None
    speed_gt_per_s: float | None
    health: Health


def parse_metric(text: str) -> tuple[Metric, ...]:
    """`amd-smi metric --json`. Guests have neither ECC nor PCIe counters: those are unknown, not zero."""
    return tuple(_metric(entry, index) for index, entry in enumerate(_entries(text, what="amd-smi metric")))


def _metric(entry: Mapping[str, Any], index: int) -> Metric:
    memory, pcie, ecc = (mapping(entry.get(k)) for k in ("mem_usage", "pcie", "ecc"))
    total, used = size(memory.get("total_vram"), unit="MB"), size(memory.get("used_vram"), unit="MB")
    free = size(memory.get("free_vram"), unit="MB")
    heat, power = mapping(entry.get("temperature")), mapping(entry.get("power"))
    return Metric(
        index=_index(entry, index),
        memory_total_bytes=total or None,
        memory_free_bytes=free if free is not None else _difference(total, used),
        width=count(pcie.get("width")) or count(pcie.get("current_lanes")) or None,
        speed_gt_per_s=gt_per_s(pcie.get("speed")) or gt_per_s(pcie.get("current_speed")),
        health=Health(
            ecc_corrected=count(ecc.get("total_correctable_count", ecc.get("total_correctable"))),
            ecc_uncorrected=count(ecc.get("total_uncorrectable_count", ecc.get("total_uncorrectable"))),
            temperature_c=_first(number(heat.get("hotspot")), number(heat.get("edge"))),
            power_w=_first(number(power.get("socket_power")), number(power.get("current_socket_power"))),
            pcie_replays=count(pcie.get("replay_count")),
        ),
    )


def parse_processes(text: str) -> dict[int, tuple[Process, ...]]:
    """GPU index -> its processes, of `amd-smi process --json` in both of its shapes."""
    found: dict[int, tuple[Process, ...]] = {}
    for position, entry in enumerate(_entries(text, what="amd-smi process")):
        listed = entry.get("process_list", entry.get("process_info"))
        raw = items(listed) if isinstance(listed, list) else [{"process_info": listed}]
        seen = [mapping(mapping(item).get("process_info", item)) for item in raw]
        found[_index(entry, position)] = tuple(p for p in map(_process, seen) if p)
    return found


def _process(entry: Mapping[str, Any]) -> Process | None:
    pid = count(entry.get("pid"))
    if pid is None:
        return None  # "No running processes detected"
    memory = size(mapping(entry.get("memory_usage")).get("vram_mem"), unit="B")
    return Process(pid, told(entry.get("name")), memory if memory is not None else size(entry.get("mem_usage")))


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> XGMI or PCIE, of `amd-smi topology --json`."""
    found: dict[tuple[int, int], str] = {}
    for position, entry in enumerate(_entries(text, what="amd-smi topology")):
        for link in items(entry.get("links")):
            peer, kind = count(mapping(link).get("gpu")), told(mapping(link).get("link_type"))
            if peer is not None and kind and peer != _index(entry, position):
                found[_index(entry, position), peer] = kind.upper()
    return found


def parse_rocm_smi(text: str, *, makers: str = "(?!.*haiguang)") -> tuple[GpuFacts, ...]:
    """`rocm-smi ... --json` of any version: keys renamed over time, every value a string, warnings around it.

    `makers`: a pattern of the vendors whose cards are meant, as their builds of the tool show their own. Raises
    Undetermined when the output holds no card.
    """
    cards, shared = _cards(text)
    cards = {n: c for n, c in cards.items() if re.match(makers, str(c.get("card vendor", "")), re.IGNORECASE)}
    driver = told(shared.get("driver version"))
    return tuple(_card(card, index, driver) for index, card in sorted(cards.items()))


def _card(card: Mapping[str, Any], index: int, driver: str | None) -> GpuFacts:
    total, used = (_vram(card, f"vram total {word}memory") for word in ("", "used "))
    mode, memory_mode = card.get("compute partition"), card.get("memory partition")
    return GpuFacts(
        vendor=NAME,
        index=index,
        **names(*(card.get(key) for key in ("card series", "device name", "card model"))),
        pci_id=pci_id("0x1002", card.get("device id") or card.get("gpu id")),
        architecture=told(card.get("gfx version")),
        memory_total_bytes=total or None,
        memory_free_bytes=_difference(total, used),
        uuid=_unique(card.get("unique id")),
        serial=serial(card.get("serial number")),
        pci=pci_address(card.get("pci bus")),
        numa_node=node(card.get("(topology) numa node")),
        partition=Partition(mode=_mode(mode), memory_mode=_mode(memory_mode)),
        driver=driver,
        firmware=told(card.get("vbios version")),
    )


def _vram(card: Mapping[str, Any], key: str) -> int | None:
    return size(card[f"{key} (b)"]) if f"{key} (b)" in card else size(card.get(f"{key} (mib)"), unit="MiB")


def parse_ras(text: str) -> tuple[int | None, int | None]:
    """(corrected, uncorrected) of a sysfs RAS counter file: `ue: 0` and `ce: 3`."""
    values = key_values(text)
    return count(values.get("ce")), count(values.get("ue"))


def _cards(text: str) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Card number -> its keys in lower case, of all documents together; and what is told for the system."""
    cards: dict[int, dict[str, Any]] = {}
    shared: dict[str, Any] = {}
    for document in json_documents(text):
        for key, value in mapping(document).items():
            plain = {str(k).strip().rstrip(":").lower(): v for k, v in mapping(value).items()}
            match = re.fullmatch(r"card(\d{1,4})", str(key))
            if match and plain:
                cards.setdefault(int(match.group(1)), {}).update(plain)
            elif str(key).lower() == "system":
                shared.update(plain)
    if not cards:
        raise Undetermined("rocm-smi's answer names no card")
    return cards, shared


def _entries(text: str, *, what: str) -> list[Mapping[str, Any]]:
    """The per-GPU objects of an amd-smi answer, in both generations' shapes."""
    for document in json_documents(text):
        listed = document if isinstance(document, list) else mapping(document).get("gpu_data", [document])
        entries = [mapping(entry) for entry in items(listed)]
        if entries and all("gpu" in entry for entry in entries):
            return entries
    raise Undetermined(f"{what} gave no JSON that lists GPUs")


def _index(entry: Mapping[str, Any], position: int) -> int:
    found = count(entry.get("gpu"))
    return position if found is None else found


def names(*texts: object) -> dict[str, Any]:
    """The first of several as the product's name, and the others; an id or a SKU (0x74a1, 67XA6S, D05101) is none."""
    found = list(dict.fromkeys(n for n in map(told, texts) if n and not _CODE.fullmatch(n)))
    return {"name": found[0] if found else None, "other_names": tuple(found[1:]) or None}


def _unique(value: object) -> str | None:
    """GPU-<16 hexadecimal digits>, the form that the runtime's device selection takes."""
    text = told(value) if isinstance(value, str) else None
    match = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{1,16})", text or "")
    unique = int(match.group(1), 16) if match else 0
    return f"GPU-{unique:016x}" if unique else None


def _generation(bus: Mapping[str, Any]) -> float | None:
    match = re.search(r"(\d)", str(bus.get("pcie_interface_version") or ""))
    return PCIE_GENERATIONS.get(int(match.group(1))) if match else None


def _mode(value: object) -> str | None:
    word = told(value)
    return word.lower() if word else None


def _difference(total: int | None, used: int | None) -> int | None:
    return total - used if total and used is not None and used <= total else None


def _first(*values: float | None) -> float | None:
    return next((v for v in values if v is not None), None)
