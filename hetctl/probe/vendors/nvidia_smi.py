"""What `nvidia-smi` prints, over the driver generations: XML, the topology matrix, NVLink states, the list, CSV."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetctl.comm.contract.errors import Undetermined
from hetctl.comm.contract.facts import GpuFacts, Health, Instance, Near, Partition, Pcie, Process
from hetctl.probe.words import PCIE_GENERATIONS, count, flag, node, number, pci_address, serial, size, told

NAME = "nvidia"


@dataclass(frozen=True)
class SmiAnswer:
    """What one `nvidia-smi -q -x` said."""

    gpus: tuple[GpuFacts, ...] = ()
    driver: str | None = None
    cuda: str | None = None


def parse_xml(text: str) -> SmiAnswer:
    """`nvidia-smi -q -x` of any driver: tags moved over the years, so each value has its list of places.

    Raises Undetermined when it is no such document.
    """
    if "<!ENTITY" in text:
        raise Undetermined("nvidia-smi's XML declares entities, which it never does")
    document = _DOCUMENT.search(text)  # warnings may stand around it
    try:
        root = ElementTree.fromstring(document.group() if document else text.strip())
    except (ElementTree.ParseError, ValueError, RecursionError):
        raise Undetermined("nvidia-smi's XML cannot be parsed") from None
    if root.tag != "nvidia_smi_log":
        raise Undetermined("nvidia-smi's XML is not a log")
    found = [_gpu(element, index) for index, element in enumerate(root.findall("gpu"))]
    return SmiAnswer(tuple(found), _text(root, "driver_version"), _text(root, "cuda_version"))


def _gpu(gpu: ElementTree.Element, index: int) -> GpuFacts:
    address = pci_address(_text(gpu, "pci/pci_bus_id") or gpu.get("id"))
    return GpuFacts(
        vendor=NAME,
        index=index,
        name=_text(gpu, "product_name"),
        pci_id=_identity(_text(gpu, "pci/pci_device_id")),
        subsystem_id=_identity(_text(gpu, "pci/pci_sub_system_id")),
        architecture=_ARCHITECTURES.get((_text(gpu, "product_architecture") or "").lower()),
        memory_total_bytes=size(_text(gpu, "fb_memory_usage/total"), unit="MiB"),
        memory_free_bytes=size(_text(gpu, "fb_memory_usage/free"), unit="MiB"),
        uuid=_text(gpu, "uuid"),
        serial=serial(gpu.findtext("serial")),
        pci=address,
        numa_node=node(_text(gpu, "pci/numa_node", "gpu_numa_node")),
        pcie=_pcie(gpu),
        partition=_partition(gpu),
        firmware=_text(gpu, "vbios_version"),
        ecc_enabled=flag(_text(gpu, "ecc_mode/current_ecc")),
        health=_health(gpu),
        processes=_processes(gpu),
        problem=_problem(gpu),
    )


def _identity(text: str | None) -> str | None:
    """10de:2330 of 233010DE, the device before its vendor."""
    match = re.fullmatch(r"(?:0x)?([0-9A-Fa-f]{4})([0-9A-Fa-f]{4})", text or "")
    return f"{match[2]}:{match[1]}".lower() if match else None


def _problem(gpu: ElementTree.Element) -> str | None:
    """What the tool says in place of values that a GPU has as long as it works."""
    words = {(element.text or "").strip().strip("[]"): None for element in gpu.iter()}
    broken = [word for word in words if word.lower() in _BROKEN]
    vital = (gpu.findtext(place) or "" for place in ("product_name", "uuid", "fb_memory_usage/total"))
    broken += [word for word in (v.strip().strip("[]") for v in vital) if word.lower() == "unknown error"]
    return f"nvidia-smi says '{broken[0]}' of it" if broken else None


def parse_failures(text: str) -> tuple[str | None, dict[str, str]]:
    """Why nvidia-smi can use no GPU at all, and PCI address or index of a GPU -> why it cannot use that one."""
    refused = _REFUSED.search(text)
    lost = {}
    for place, why in _NO_HANDLE.findall(text):
        found = re.search(r"(?<![0-9a-fA-F])[0-9a-fA-F]+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", place)
        padded = found.group().rjust(12, "0") if found else None
        lost[pci_address(padded) or place.strip(" :")] = why.split(".")[0].strip()
    return refused.group().strip() if refused else None, lost


def _pcie(gpu: ElementTree.Element) -> Pcie:
    info = "pci/pci_gpu_link_info/"
    current = count(_text(gpu, info + "pcie_gen/current_link_gen", info + "pcie_gen/device_current_link_gen"))
    best = count(_text(gpu, info + "pcie_gen/max_link_gen", info + "pcie_gen/max_device_link_gen"))
    return Pcie(
        width=count(_text(gpu, info + "link_widths/current_link_width")) or None,
        max_width=count(_text(gpu, info + "link_widths/max_link_width")) or None,
        speed_gt_per_s=PCIE_GENERATIONS.get(current or 0),
        max_speed_gt_per_s=PCIE_GENERATIONS.get(best or 0),
    )


def _partition(gpu: ElementTree.Element) -> Partition:
    current, pending = flag(_text(gpu, "mig_mode/current_mig")), flag(_text(gpu, "mig_mode/pending_mig"))
    instances = [
        Instance(
            profile=_text(device, "profile", "device_attributes/profile"),
            uuid=_text(device, "uuid"),
            memory_total_bytes=size(_text(device, "fb_memory_usage/total"), unit="MiB"),
            memory_free_bytes=size(_text(device, "fb_memory_usage/free"), unit="MiB"),
        )
        for device in gpu.findall("mig_devices/mig_device")
    ]
    words = {True: "mig", False: "none", None: None}
    return Partition(
        mode=words[current], pending_mode=words[pending] if pending != current else None, instances=tuple(instances)
    )


def _health(gpu: ElementTree.Element) -> Health:
    return Health(
        ecc_corrected=_sum(gpu, "ecc_errors/volatile", _CORRECTED),
        ecc_uncorrected=_sum(gpu, "ecc_errors/volatile", _UNCORRECTED),
        rows_pending=_any(
            flag(_text(gpu, "remapped_rows/remapped_row_pending")),
            flag(_text(gpu, "retired_pages/pending_retirement", "retired_pages/pending_blacklist")),
        ),
        remap_failed=flag(_text(gpu, "remapped_rows/remapped_row_failure")),
        recovery_action=_word(gpu.find("gpu_recovery_action")),
        throttle_reasons=_throttling(gpu),
        temperature_c=number(_text(gpu, "temperature/gpu_temp")),
        power_w=number(_text(gpu, *(f"{g}/{n}" for g in _POWER_GROUPS for n in _POWER_NAMES))),
        power_limit_w=number(_text(gpu, *(f"{g}/{n}" for g in _POWER_GROUPS for n in _LIMIT_NAMES))),
        pcie_replays=count(_text(gpu, "pci/replay_counter")),
        fabric_state=_text(gpu, "fabric/state"),
    )


def _throttling(gpu: ElementTree.Element) -> tuple[str, ...] | None:
    for group, prefix in (("clocks_event_reasons", "clocks_event_reason_"), ("clocks_throttle_reasons", "")):
        element = gpu.find(group)
        if element is None:
            continue
        states = {e.tag.removeprefix(prefix).removeprefix("clocks_throttle_reason_"): flag(e.text) for e in element}
        if any(state is not None for state in states.values()):
            return tuple(name for name, state in states.items() if state and name not in _HARMLESS)
    return None


def _processes(gpu: ElementTree.Element) -> tuple[Process, ...] | None:
    listed = gpu.find("processes")
    if listed is None or (len(listed) == 0 and (listed.text or "").strip()):
        return None  # the text is N/A or [Insufficient Permissions]
    found = []
    for entry in listed.findall("process_info"):
        pid = count(_text(entry, "pid"))
        if pid is not None:
            memory = size(_text(entry, "used_memory"), unit="MiB")
            found.append(Process(pid, _text(entry, "process_name"), memory))
    return tuple(found)


def parse_compute_capabilities(text: str) -> dict[str, str]:
    """UUID -> sm_90 of `--query-gpu=uuid,compute_cap`; empty when an old driver does not know the field."""
    rows = re.findall(r"^\s*(GPU-[0-9a-fA-F-]{8,64})\s*,\s*(\d{1,3})\.(\d{1,2})\s*$", text, re.MULTILINE)
    return {uuid: f"sm_{major}{minor}" for uuid, major, minor in rows}


QUERY_FIELDS = (  # known to every driver: one that is not would fail the whole query
    *("index", "name", "uuid", "pci.bus_id", "driver_version", "memory.total", "memory.free"),
    *("pcie.link.width.max", "vbios_version", "serial"),
)


def parse_query(text: str) -> tuple[GpuFacts, ...]:
    """The GPUs of `--query-gpu` with QUERY_FIELDS, CSV without a header; empty where it is no such table."""
    found = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        row = dict(zip(QUERY_FIELDS, words, strict=False))
        index, pci = count(row.get("index")), pci_address(row.get("pci.bus_id"))
        if len(words) == len(QUERY_FIELDS) and index is not None and pci is not None:
            found.append(_queried(row, index, pci))
    return tuple(found)


def _queried(row: Mapping[str, str], index: int, pci: str) -> GpuFacts:
    return GpuFacts(
        vendor=NAME,
        index=index,
        pci=pci,
        name=told(row["name"]),
        uuid=told(row["uuid"]),
        driver=told(row["driver_version"]),
        memory_total_bytes=size(row["memory.total"], unit="MiB"),
        memory_free_bytes=size(row["memory.free"], unit="MiB"),
        pcie=Pcie(max_width=count(row["pcie.link.width.max"])),
        firmware=told(row["vbios_version"]),
        serial=serial(row["serial"]),
    )


@dataclass(frozen=True)
class Matrix:
    """`nvidia-smi topo -m`: cells by (row, column) label, and the NIC labels' RDMA devices where a legend tells."""

    cells: Mapping[tuple[str, str], tuple[Near, int | None]]
    nics: Mapping[str, str]


def parse_topology(text: str) -> Matrix:
    """The matrix whatever its columns: NICs as NIC0 with a legend or by device name, affinity columns or none.

    The header is underlined by terminal escapes even in a file; cells are one word each, so that the words after the
    header's devices (affinities, which may hold blanks) need no understanding.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in text.splitlines()]
    columns: list[str] = []
    cells: dict[tuple[str, str], tuple[Near, int | None]] = {}
    nics: dict[str, str] = {}
    for line in lines:
        words = line.split()
        legend = re.fullmatch(r"\s*(NIC\d{1,4})\s*:\s*(\S+)\s*", line)
        if legend:
            nics[legend.group(1)] = legend.group(2)
        elif not columns and re.match(r"\s*GPU0\b", line) and "X" not in words:
            columns = re.split(r"\s(?=CPU Affinity|NUMA Affinity|GPU NUMA)", line.strip())[0].split()
        elif columns and words and words[0] in columns:
            for column, word in zip(columns, words[1:], strict=False):
                near = _near(word)
                if near and column != words[0]:
                    cells[words[0], column] = near
    return Matrix(cells, nics)


def _near(word: str) -> tuple[Near, int | None] | None:
    known: dict[str, Near] = {"PIX": "pix", "PXB": "pxb", "PHB": "phb", "NODE": "node", "SYS": "sys"}
    bonded = re.fullmatch(r"NV(\d{1,3})", word)
    if bonded:
        return "nvlink", int(bonded.group(1))
    return (known[word], None) if word in known else None


def parse_nvlink(text: str) -> dict[str, tuple[int, int | None]]:
    """UUID -> (links up, links down) of `nvidia-smi nvlink -s`, which says only "all" where none is up."""
    found: dict[str, tuple[int, int | None]] = {}
    uuid = None
    for line in text.splitlines():
        header = re.match(r"\s*GPU \d{1,4}:.*\(UUID: (\S+)\)", line)
        if header:
            uuid = header.group(1)
        link = re.match(r"\s*Link \d{1,3}:\s*(.+)", line)
        if link and uuid:
            up, down = found.get(uuid, (0, 0))
            found[uuid] = (up, (down or 0) + 1) if "inactive" in link.group(1).lower() else (up + 1, down)
        elif uuid and "all links are inactive" in line.lower():
            found[uuid] = (0, None)
    return found


def parse_instances(text: str) -> dict[str, tuple[Instance, ...]]:
    """GPU UUID -> its MIG instances (profile and UUID) of `nvidia-smi -L`."""
    found: dict[str, tuple[Instance, ...]] = {}
    uuid = None
    for line in text.splitlines():
        gpu = re.match(r"\s*GPU \d{1,4}:.*\(UUID: (\S+)\)", line)
        mig = re.match(r"\s*MIG (\S+)\s+Device\s+\d{1,3}:\s*\(UUID: (\S+)\)", line)
        if gpu:
            uuid = gpu.group(1)
        elif mig and uuid:
            found[uuid] = (*found.get(uuid, ()), Instance(profile=mig.group(1), uuid=mig.group(2)))
    return found


def _text(element: ElementTree.Element, *places: str) -> str | None:
    """The first of several places that tells something."""
    for place in places:
        value = told(element.findtext(place))
        if value is not None:
            return value
    return None


def _word(element: ElementTree.Element | None) -> str | None:
    """A word for which None is a value: the driver's advice is 'None' on a healthy GPU."""
    text = (element.text or "").strip() if element is not None else ""
    return "none" if text.lower() == "none" else told(text)


def _sum(gpu: ElementTree.Element, group: str, names: Iterable[str]) -> int | None:
    counted = [c for c in (count(_text(gpu, f"{group}/{name}")) for name in names) if c is not None]
    return sum(counted) if counted else None


def _any(*flags: bool | None) -> bool | None:
    known = [f for f in flags if f is not None]
    return any(known) if known else None


_DOCUMENT = re.compile(r"<nvidia_smi_log\b.*</nvidia_smi_log>", re.DOTALL)
_BROKEN = ("gpu is lost", "gpu requires reset", "err!")
_REFUSED = re.compile(r"Failed to initialize NVML: [^\n]+|NVIDIA-SMI has failed because [^\n]+|No devices were found")
_NO_HANDLE = re.compile(  # GPU 0000:02:00.0: GPU is lost; GPU0: 0000:01:00.0: Unknown Error; GPU2: Unknown Error
    r"Unable to determine the device handle for [Gg][Pp][Uu] ?([0-9A-Fa-f:. ]*?): *\n?([A-Z][^\n:]*)"
)
_ARCHITECTURES = {"volta": "sm_70", "turing": "sm_75", "ada lovelace": "sm_89", "hopper": "sm_90"}  # the unambiguous
_CORRECTED = ("sram_correctable", "dram_correctable", "single_bit/total")
_UNCORRECTED = (
    *("sram_uncorrectable", "sram_uncorrectable_parity", "sram_uncorrectable_secded", "dram_uncorrectable"),
    "double_bit/total",
)
_POWER_GROUPS = ("gpu_power_readings", "module_power_readings", "power_readings")
_POWER_NAMES = ("average_power_draw", "instant_power_draw", "power_draw")
_LIMIT_NAMES = ("current_power_limit", "enforced_power_limit", "power_limit")
_HARMLESS = ("gpu_idle", "applications_clocks_setting", "sync_boost")
