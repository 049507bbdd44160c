"""AMD GPUs: the KFD topology and sysfs first, then `amd-smi --json`, then `rocm-smi --json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetctl.comm.contract.facts import GpuFacts, Health, Partition, Pcie, Process, Reach
from hetctl.probe.notes import Notes
from hetctl.probe.raw import Raw
from hetctl.probe.topology import PCI
from hetctl.probe.vendors import amd_smi
from hetctl.probe.vendors.amd_smi import KFD, NAME, PCI_VENDOR, KfdNode, Metric
from hetctl.probe.vendors.base import Tool, Vendor, bound_devices, parsed, pcie_of, physical, sysfs_pcie, warn_of_hidden
from hetctl.probe.words import count, mapping, node, serial, told

DRIVER = "amdgpu"
STATIC, METRIC, PROCESS, TOPO = (f"amd-smi {word}" for word in ("static", "metric", "process", "topology"))
ROCM = "rocm-smi"
OPINION = "rocm-smi, asked as well"
_ROCM_WORDS = (
    *("--showproductname", "--showuniqueid", "--showserial", "--showbus", "--showdriverversion", "--showvbios"),
    *("--showmeminfo", "vram", "--showcomputepartition", "--showmemorypartition", "--showtoponuma", "--json"),
)
TOOLS = {
    STATIC: Tool(("amd-smi", "static", "--json")),
    METRIC: Tool(("amd-smi", "metric", "--json")),
    PROCESS: Tool(("amd-smi", "process", "--json")),
    TOPO: Tool(("amd-smi", "topology", "--json")),
    ROCM: Tool(("rocm-smi", *_ROCM_WORDS), instead_of=STATIC),
}


def gpus(raw: Raw, notes: Notes) -> tuple[GpuFacts, ...]:
    """Every GPU that a process on the host can use, in KFD's order, which is the order in which HIP counts them."""
    bound = [pci for pci, driver in bound_devices(raw, pci_vendor=PCI_VENDOR).items() if driver == DRIVER]
    nodes = amd_smi.kfd_nodes(raw)
    tools = _ask_tools(raw, notes, expected=bool(nodes or bound))
    if nodes:
        shown = [(GpuFacts(NAME, i, pci=physical(raw, n.pci)), n) for i, n in enumerate(nodes)]
        warn_of_hidden(notes, bound, [gpu for gpu, _ in shown], "KFD")
    else:
        listed = [g.pci for g in tools.static] or [g.pci for g in tools.rocm]
        if not any(listed) and len(listed) in (0, len(bound)):
            listed = list(bound)
        shown = [(GpuFacts(NAME, i, pci=pci), KfdNode(-1)) for i, pci in enumerate(listed)]
        if shown:
            warn_of_hidden(notes, bound, [gpu for gpu, _ in shown], "amd-smi or rocm-smi")
            notes.warn("KFD's topology cannot be read: GPUs are counted as the tools list them, HIP may differ")
    closed = mapping(raw.values.get("openable")).get("/dev/kfd") is False
    problem = "this user has no permission to open /dev/kfd" if closed else None
    return tuple(
        _merge(raw, notes.at(f"gpus[{gpu.id}]"), replace(gpu, problem=problem), known, tools) for gpu, known in shown
    )


def links(raw: Raw, gpus: tuple[GpuFacts, ...]) -> Mapping[tuple[str, str], Reach]:
    """(GPU id, GPU id) -> xGMI as KFD's links say, or as `amd-smi topology` does where KFD is silent."""
    nodes = amd_smi.kfd_nodes(raw)
    by_node = {n.number: g.id for n, g in zip(nodes, gpus, strict=False)}
    found = {
        (by_node[n.number], by_node[peer]): Reach(by_node[peer], "xgmi")
        for n in nodes
        for peer in n.xgmi
        if n.number in by_node and peer in by_node
    }
    told_by_tool = parsed(raw, TOPO, amd_smi.parse_topology, Notes(), strict=False) or {}
    statics = parsed(raw, STATIC, amd_smi.parse_static, Notes(), strict=False) or ()
    ids = {s.index: g.id for s in statics for g in gpus if s.pci and s.pci == g.pci}
    for (a, b), kind in told_by_tool.items():
        if kind == "XGMI" and a in ids and b in ids and ids[a] != ids[b]:
            found.setdefault((ids[a], ids[b]), Reach(ids[b], "xgmi"))
    return found


def opinion(raw: Raw) -> tuple[GpuFacts, ...]:
    """The GPUs as rocm-smi tells them, or amd-smi where that is all there is, apart from KFD and sysfs."""
    static = parsed(raw, STATIC, amd_smi.parse_static, Notes(), strict=False) or ()
    # amd-smi's firmware is the IFWI's version where sysfs and rocm-smi tell the VBIOS's part number
    return parsed(raw, OPINION, amd_smi.parse_rocm_smi, Notes(), strict=False) or tuple(
        replace(g, firmware=None) for g in static
    )


def dma_buf_blocker(raw: Raw) -> str | None:
    """Nothing in files tells: in-tree drivers need CONFIG_HSA_AMD_P2P, packaged ones carry it."""
    return None


@dataclass(frozen=True)
class Tools:
    """What the tools said, by PCI address where they say one."""

    static: tuple[GpuFacts, ...] = ()
    rocm: tuple[GpuFacts, ...] = ()
    metrics: Mapping[int, Metric] = field(default_factory=dict)
    processes: Mapping[int, tuple[Process, ...]] = field(default_factory=dict)

    def of(self, gpu: GpuFacts, kfd: KfdNode) -> tuple[GpuFacts, GpuFacts, Metric | None, tuple[Process, ...] | None]:
        """What they said of a GPU; they write the number of a partition in place of the PCI function."""
        place = gpu.pci and (f"{gpu.pci[:-1]}{kfd.partition}" if kfd.partition else gpu.pci)

        def told_of(found: Sequence[GpuFacts]) -> GpuFacts:
            if kfd.number < 0 and gpu.index < len(found) and found[gpu.index].pci is None:
                return found[gpu.index]  # it is one of those that the tool listed, without any address
            return next((f for f in found if place and f.pci == place), GpuFacts(NAME, -1))

        static, rocm = told_of(self.static), told_of(self.rocm)
        return static, rocm, self.metrics.get(static.index), self.processes.get(static.index)


def _ask_tools(raw: Raw, notes: Notes, *, expected: bool) -> Tools:
    quiet = Notes()
    static = parsed(raw, STATIC, amd_smi.parse_static, quiet, strict=False) or ()
    rocm = parsed(raw, ROCM, amd_smi.parse_rocm_smi, quiet, strict=False) or ()
    if expected and not static and not rocm:
        for sentence in quiet.warnings:
            notes.warn(sentence)
    metrics = parsed(raw, METRIC, amd_smi.parse_metric, quiet, strict=False) or ()
    processes = parsed(raw, PROCESS, amd_smi.parse_processes, quiet, strict=False) or {}
    return Tools(static, rocm, {m.index: m for m in metrics}, processes)


def _merge(raw: Raw, notes: Notes, gpu: GpuFacts, kfd: KfdNode, tools: Tools) -> GpuFacts:
    """One GPU from KFD and sysfs where they tell, else from amd-smi, else from rocm-smi."""
    base = PCI + (gpu.pci or "none")
    static, rocm, metric, processes = tools.of(gpu, kfd)
    sysfs = _of_sysfs(raw, gpu, base)
    now = Pcie(width=metric.width, speed_gt_per_s=metric.speed_gt_per_s) if metric else Pcie()
    links = (sysfs_pcie(raw, gpu.pci), "sysfs"), (now, METRIC), (static.pcie, STATIC)
    told_by_all = (sysfs, "sysfs"), (static, STATIC), (rocm, ROCM)
    parts = notes.at("partition").pick_each(
        ("mode", "memory_mode"), *((g.partition, source) for g, source in told_by_all)
    )
    picked = notes.pick_each(("name", "serial", "numa_node", "driver", "firmware"), *told_by_all)
    names = dict.fromkeys(name for one in (static, rocm) for name in one.names if name != picked["name"])
    return replace(
        gpu,
        **picked,
        other_names=tuple(names) or None,
        pci_id=static.pci_id or rocm.pci_id,
        subsystem_id=static.subsystem_id,
        **notes.pick_each(("memory_total_bytes", "uuid"), (kfd, KFD), *told_by_all),
        **notes.pick_each(("architecture",), (kfd, KFD), (static, STATIC), (rocm, ROCM)),
        memory_free_bytes=_free(raw, notes, base, kfd, metric, rocm),
        pcie=pcie_of(notes, *links),
        partition=Partition(**parts),
        processes=notes.pick("processes", (processes, PROCESS)),
        health=_health(raw, notes, base, kfd, static, metric),
    )


def _of_sysfs(raw: Raw, gpu: GpuFacts, base: str) -> GpuFacts:
    """What the driver's files say of one GPU."""
    unique = count(f"0x{raw.text(base + '/unique_id') or ''}")
    mode, memory_mode = (told(raw.text(f"{base}/current_{word}_partition")) for word in ("compute", "memory"))
    return replace(
        gpu,
        **amd_smi.names(raw.text(base + "/product_name")),
        memory_total_bytes=count(raw.text(base + "/mem_info_vram_total")) or None,
        uuid=f"GPU-{unique:016x}" if unique else None,
        serial=serial(raw.text(base + "/serial_number")),
        numa_node=node(raw.text(base + "/numa_node")),
        partition=Partition(mode.lower() if mode else None, memory_mode.lower() if memory_mode else None),
        driver=told(raw.text("/sys/module/amdgpu/version")),
        firmware=told(raw.text(base + "/vbios_version")),
    )


def _free(raw: Raw, notes: Notes, base: str, kfd: KfdNode, metric: Metric | None, rocm: GpuFacts) -> int | None:
    """Free memory; sysfs counts the whole package, so it is believed only where that is what the device is."""
    total, used = (count(raw.text(f"{base}/mem_info_vram_{word}")) for word in ("total", "used"))
    whole = total and used is not None and used <= total and kfd.memory_total_bytes in (None, total)
    return notes.pick(
        "memory_free_bytes",
        (total - used if whole and total and used is not None else None, "sysfs"),
        (metric.memory_free_bytes if metric else None, METRIC),
        (rocm.memory_free_bytes, ROCM),
    )


def _health(raw: Raw, notes: Notes, base: str, kfd: KfdNode, static: GpuFacts, metric: Metric | None) -> Health:
    corrected, uncorrected = amd_smi.parse_ras(raw.files.get(base + "/ras/umc_err_count", ""))
    told_by_tool = metric.health if metric else Health()
    return Health(
        ecc_corrected=notes.pick("health.ecc_corrected", (told_by_tool.ecc_corrected, METRIC), (corrected, "sysfs")),
        ecc_uncorrected=notes.pick(
            "health.ecc_uncorrected", (told_by_tool.ecc_uncorrected, METRIC), (uncorrected, "sysfs umc only")
        ),
        temperature_c=notes.pick("health.temperature_c", (told_by_tool.temperature_c, METRIC)),
        power_w=notes.pick("health.power_w", (told_by_tool.power_w, METRIC)),
        power_limit_w=notes.pick("health.power_limit_w", (static.health.power_limit_w, STATIC)),
        pcie_replays=notes.pick("health.pcie_replays", (told_by_tool.pcie_replays, METRIC)),
        links_up=notes.pick("health.links_up", (len(kfd.xgmi) or None, KFD)),
    )


VENDOR = Vendor(
    name=NAME,
    pci_vendor=PCI_VENDOR,
    drivers=(DRIVER,),
    gpus=gpus,
    links=links,
    dma_buf_blocker=dma_buf_blocker,
    tools=TOOLS,
    tool_path=("/opt/rocm/bin",),
    files=(
        *("/sys/module/amdgpu/version", "/opt/rocm/.info/version", "/opt/rocm/include/rccl/rccl.h"),
        "/usr/include/rccl/rccl.h",
    ),
    pci_files=(
        *("mem_info_vram_total", "mem_info_vram_used", "unique_id", "product_name", "serial_number", "vbios_version"),
        *("current_compute_partition", "current_memory_partition", "ras/umc_err_count"),
    ),
    trees={
        "/sys/class/kfd/kfd/topology/nodes": ("gpu_id", "properties", "mem_banks/*/properties", "io_links/*/properties")
    },
    modules="amdgpu|amdkfd|amd_peer",
    peer_memory=("ib_peer_mem", "amdkfd_peer"),
    libraries="librccl|libamdhip64",
    environment=("RCCL", "HIP", "HSA", "ROCR", "GPU_", "AMD_"),
    packages=("pytorch_triton_rocm", "triton_rocm", "rocm", "rocm_sdk_core", "rocm_sdk_libraries", "amdsmi"),
    opinion_tools={OPINION: Tool(("rocm-smi", *_ROCM_WORDS))},
    opinion=opinion,
    kernel_log="amdgpu.*([Gg][Pp][Uu] reset|uncorrectable|RAS.*(fatal|poison)|ring .* timeout|page fault)",
)
