"""NVIDIA GPUs: procfs and sysfs first, then `nvidia-smi -q -x`, then the text of `nvidia-smi topo`, `nvlink`, `-L`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from hetctl.comm.contract.facts import GpuFacts, Health, Partition, Reach
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.topology import PCI
from hetctl.probe.vendors import nvidia_smi
from hetctl.probe.vendors.base import Tool, Vendor, bound_devices, parsed, pcie_of, sysfs_pcie, warn_of_hidden
from hetctl.probe.vendors.nvidia_smi import QUERY_FIELDS, SmiAnswer
from hetctl.probe.words import key_values, node, pci_address, told

NAME, PCI_VENDOR, DRIVER = "nvidia", "0x10de", "nvidia"
XML, QUERY, TOPO, NVLINK, LIST = (f"nvidia-smi {a}" for a in ("-q -x", "--query-gpu", "topo -m", "nvlink -s", "-L"))
TOOLS = {
    XML: Tool(("nvidia-smi", "-q", "-x")),
    QUERY: Tool(("nvidia-smi", "--query-gpu=uuid,compute_cap", "--format=csv,noheader")),
    TOPO: Tool(("nvidia-smi", "topo", "-m")),
    NVLINK: Tool(("nvidia-smi", "nvlink", "-s")),
    LIST: Tool(("nvidia-smi", "-L")),
}
PROC = "/proc/driver/nvidia/gpus/"
OPINION = "nvidia-smi --query-gpu, asked as well"
_FROM_XML = ("memory_total_bytes", "memory_free_bytes", "serial", "ecc_enabled", "processes")
_HEALTH_FROM_XML = [f.name for f in fields(Health) if f.name not in ("links_up", "links_down")]


def gpus(raw: Raw, notes: Notes) -> tuple[GpuFacts, ...]:
    """Every GPU that a process on the host can use, in PCI order (nvidia-smi's and CUDA_DEVICE_ORDER=PCI_BUS_ID's)."""
    bound = [pci for pci, driver in bound_devices(raw, pci_vendor=PCI_VENDOR).items() if driver == DRIVER]
    in_proc = sorted(a for a in map(pci_address, {p[len(PROC) :].split("/")[0] for p in _proc_files(raw)}) if a)
    aloud = notes if bound or in_proc or raw.tool(XML).stdout.strip() else Notes()
    answer = parsed(raw, XML, nvidia_smi.parse_xml, aloud, name="nvidia-smi", strict=False) or SmiAnswer()
    shown = _with_unusable(raw, answer, in_proc or bound)
    if answer.gpus:
        warn_of_hidden(notes, bound, shown, "nvidia-smi")
    capabilities = nvidia_smi.parse_compute_capabilities(raw.tool(QUERY).stdout)
    states = nvidia_smi.parse_nvlink(raw.tool(NVLINK).stdout)
    found = []
    for index, gpu in enumerate(shown):
        below = notes.at(f"gpus[{NAME}:{index}]")
        merged = _merge(raw, below, replace(gpu, index=index), answer)
        found.append(_with_text(merged, capabilities, states, below))
        if _VGPU.search(merged.name or ""):
            whose = f"GPU {merged.id} ({merged.name}) is a vGPU"
            notes.warn(f"{whose}: it shares a GPU's time and memory with other guests, and is slower")
    return tuple(found)


def _with_unusable(raw: Raw, answer: SmiAnswer, seen: Sequence[str]) -> list[GpuFacts]:
    """The GPUs that nvidia-smi shows, else those at `seen`, and those that it cannot get at, with why; in PCI order."""
    refused, lost = nvidia_smi.parse_failures(f"{raw.tool(XML).stdout}\n{raw.tool(XML).stderr}")
    lost = {_place(at, seen): why for at, why in lost.items()}
    known = answer.gpus or tuple(GpuFacts(NAME, 0, pci=pci, problem=refused) for pci in seen)
    further = lost.keys() - {gpu.pci for gpu in known}
    known += tuple(GpuFacts(NAME, 0, pci=pci) for pci in further if pci_address(pci))
    marked = (replace(gpu, problem=lost.get(gpu.pci or "") or gpu.problem) for gpu in known)
    return sorted(marked, key=lambda gpu: gpu.pci or "")


def _place(named: str, seen: Sequence[str]) -> str:
    """The PCI address of a GPU that nvidia-smi names by index or address; some write an address wrong after the bus."""
    if named.isdecimal():
        return seen[int(named)] if int(named) < len(seen) else named
    on_bus = [pci for pci in seen if pci[:7] == named[:7]]
    return on_bus[0] if named not in seen and len(on_bus) == 1 else named


def links(raw: Raw, gpus: tuple[GpuFacts, ...]) -> Mapping[tuple[str, str], Reach]:
    """(GPU id, GPU id or RDMA device) -> how near, as `nvidia-smi topo -m` says."""
    matrix = nvidia_smi.parse_topology(raw.tool(TOPO).stdout)
    names = {f"GPU{g.index}": g.id for g in gpus} | dict(matrix.nics)
    found: dict[tuple[str, str], Reach] = {}
    for (row, column), (path, lanes) in matrix.cells.items():
        if row.startswith("GPU") and row in names and names.get(column, "") != names[row]:
            to = names.get(column, column)
            found[names[row], to] = Reach(to, path, lanes)
    return found


def dma_buf_blocker(raw: Raw) -> str | None:
    """Only the open kernel modules export device memory as dma-buf."""
    version = raw.text(PROC_VERSION) or ""
    return None if not version or "Open Kernel Module" in version else "proprietary kernel modules export no dma-buf"


def opinion(raw: Raw) -> tuple[GpuFacts, ...]:
    """The GPUs as nvidia-smi's own query tells them, apart from the XML, procfs and sysfs."""
    return nvidia_smi.parse_query(raw.tool(OPINION).stdout)


def _merge(raw: Raw, notes: Notes, gpu: GpuFacts, answer: SmiAnswer) -> GpuFacts:
    """One GPU from sysfs and procfs where they tell, from the XML where they do not."""
    base = PCI + (gpu.pci or "")
    proc = key_values(_information(raw, gpu.pci))
    says = (raw.text(PROC_VERSION) or "")[:1000]
    version = re.search(r"Kernel Module[^\n]*?\s(\d{1,4}\.\d{1,4}(?:\.\d{1,4})?)\s", says)
    pick = notes.pick
    of_proc = replace(
        gpu, name=told(proc.get("Model")), uuid=_uuid(proc.get("GPU UUID")), firmware=_vbios(proc.get("Video BIOS"))
    )
    return replace(
        gpu,
        **notes.pick_each(("name", "uuid", "firmware"), (of_proc, PROC), (gpu, XML)),
        **notes.pick_each(_FROM_XML, (gpu, XML)),
        driver=pick("driver", (version.group(1) if version else None, PROC_VERSION), (answer.driver, XML)),
        numa_node=pick("numa_node", (node(raw.text(base + "/numa_node")), "sysfs"), (gpu.numa_node, XML)),
        pcie=pcie_of(notes, (sysfs_pcie(raw, gpu.pci), "sysfs"), (gpu.pcie, XML)),
        partition=_named_instances(raw, notes, gpu),
        health=replace(gpu.health, **notes.at("health").pick_each(_HEALTH_FROM_XML, (gpu.health, XML))),
    )


def _with_text(
    gpu: GpuFacts, capabilities: Mapping[str, str], states: Mapping[str, tuple[int, int | None]], notes: Notes
) -> GpuFacts:
    """What only the tool's text tells: the compute capability and how many NVLinks are up."""
    architecture = notes.pick(
        "architecture", (capabilities.get(gpu.uuid or ""), QUERY), (gpu.architecture, XML + " product_architecture")
    )
    up, down = states.get(gpu.uuid or "", (None, None))
    health = replace(
        gpu.health,
        links_up=notes.pick("health.links_up", (up, NVLINK)),
        links_down=notes.pick("health.links_down", (down, NVLINK)),
    )
    return replace(gpu, architecture=architecture, health=health)


def _named_instances(raw: Raw, notes: Notes, gpu: GpuFacts) -> Partition:
    notes.pick("partition.mode", (gpu.partition.mode, XML))
    named = nvidia_smi.parse_instances(raw.tool(LIST).stdout).get(gpu.uuid or "", ())
    known = gpu.partition.instances
    if len(named) == len(known):
        pairs = zip(named, known, strict=True)
        known = tuple(replace(b, profile=b.profile or a.profile, uuid=b.uuid or a.uuid) for a, b in pairs)
    elif not known:
        known = named
    return replace(gpu.partition, instances=known)


def _proc_files(raw: Raw) -> list[str]:
    return [path for path in raw.files if path.startswith(PROC)]


def _information(raw: Raw, pci: str | None) -> str:
    ours = (p for p in _proc_files(raw) if pci and pci_address(p[len(PROC) :].split("/")[0]) == pci)
    return next((raw.files[path] for path in ours), "")


def _uuid(text: str | None) -> str | None:
    return text if text and re.fullmatch(r"GPU-[0-9a-fA-F-]{32,40}", text) else None  # GPU-???????? while starting


def _vbios(text: str | None) -> str | None:
    return text if text and "?" not in text else None


_VGPU = re.compile(r"-\d{1,3}[ABCQ](ME)?$")  # the profile: 40 GB of an A100D, for compute
PROC_VERSION = "/proc/driver/nvidia/version"
VENDOR = Vendor(
    name=NAME,
    pci_vendor=PCI_VENDOR,
    drivers=(DRIVER,),
    gpus=gpus,
    links=links,
    dma_buf_blocker=dma_buf_blocker,
    tools=TOOLS,
    tool_path=("/usr/local/nvidia/bin", "/usr/lib/wsl/lib"),
    files=(PROC_VERSION, "/proc/driver/nvidia/params", PROC + "*/information", "/etc/nccl.conf", "/usr/include/nccl.h"),
    modules="nvidia|nvgpu|nv_peer|gdrdrv",
    peer_memory=("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem"),
    libraries="libnccl|libnvidia-ml|libcuda\\.so",
    environment=("NCCL", "CUDA", "NVIDIA_VISIBLE_DEVICES"),
    packages=("nvidia_nccl_cu11", "nvidia_nccl_cu12", "nvidia_nccl_cu13", "nixl_cu12", "nixl_cu13"),
    opinion_tools={OPINION: Tool(("nvidia-smi", "--query-gpu=" + ",".join(QUERY_FIELDS), "--format=csv,noheader"))},
    opinion=opinion,
    kernel_log="NVRM: Xid|NVRM: .*(fallen off|RmInitAdapter failed)",
)
