"""Dresses a machine as another: a fake root of sysfs and procfs and a folder of recorded tools for the probe to find.

    dress = dress_host(folder, Costume(name="h200-0", number=0))
    Options(root=str(dress.root), path=str(dress.tools))

The tools are shell scripts that answer after `tool_delay_s`, as long as the real ones take.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hetctl.probe.raw import Raw, ToolOutput
from hetctl.probe.wanted import wanted
from tests.rigs import recordings


@dataclass(frozen=True)
class Costume:
    """What a host should look like. GPU i and NIC i hang below one PCIe switch; the first half on NUMA node 0."""

    name: str = "node01"
    number: int = 0  # distinguishes serials, addresses and GUIDs of several hosts
    vendor: Literal["nvidia", "amd", "none"] = "nvidia"
    product: str = ""  # default: NVIDIA H200 or AMD Instinct MI325X
    gpus: int = 8
    first_slot: int = 0  # of its GPUs: those of another vendor are in the slots before
    nics: int = 8
    fabric: Literal["infiniband", "roce", "ethernet"] = "infiniband"
    nic_driver: str = "mlx5_core"  # bnxt_en, ionic, ice
    rate: str = "400 Gb/sec (4X NDR)"
    subnet_prefix: str = "fe80:0000:0000:0000"  # InfiniBand
    rail_network: str = "10.{rail}.0.{host}"  # the address of each RoCE or Ethernet NIC, /24
    management: dict[str, str] = field(default_factory=dict)  # interface -> address, beside the rails
    tool_delay_s: float = 0.5
    down: frozenset[int] = frozenset()  # NICs whose link is down
    no_subnet_manager: bool = False
    ipoib: Literal["up", "off", "none"] = "up"  # off: the interfaces are down while the InfiniBand ports work

    @property
    def model(self) -> str:
        return self.product or {"nvidia": "NVIDIA H200", "amd": "AMD Instinct MI325X"}.get(self.vendor, "")


@dataclass(frozen=True)
class Dress:
    """Where the probe should look: Options(root=..., path=...)."""

    root: Path
    tools: Path


RDMA_NAMES = {"mlx5_core": "mlx5_{i}", "bnxt_en": "bnxt_re{i}", "ionic": "ionic_{i}", "ice": "irdma{i}"}
NIC_IDS = {"mlx5_core": "15b3:1021", "bnxt_en": "14e4:1760", "ionic": "1dd8:1002", "ice": "8086:159b"}


def dress_host(folder: Path, costume: Costume) -> Dress:
    """Build root and tools below `folder`."""
    dress = Dress(folder / "root", folder / "tools")
    machine(dress.root, costume)
    for index in range(costume.gpus if costume.vendor != "none" else 0):
        gpu(dress.root, costume, index)
    for index in range(costume.nics):
        nic(dress.root, costume, index)
    for name in costume.management:
        interface(dress.root, name, speed="25000", folder="devices/pci0000:00/0000:00:1f.0/net")
    if costume.vendor == "amd":
        kfd(dress.root, costume)
    tools(dress.tools, costume)
    return dress


def write(root: Path, path: str, content: str | int) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{content}\n")


def link(root: Path, path: str, target: str) -> None:
    """A symbolic link at `path` to `target`, both inside the root."""
    at, to = root / path.lstrip("/"), root / target.lstrip("/")
    at.parent.mkdir(parents=True, exist_ok=True)
    to.mkdir(parents=True, exist_ok=True)
    at.symlink_to(to)


def machine(root: Path, costume: Costume) -> None:
    """Operating system, two sockets, two NUMA nodes, memory, modules."""
    write(root, "/etc/os-release", 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"')
    write(root, "/etc/machine-id", f"{costume.number:032x}")
    write(root, "/proc/sys/kernel/hostname", costume.name)
    write(root, "/proc/sys/kernel/osrelease", "5.15.0-105-generic")
    write(root, "/proc/sys/kernel/numa_balancing", 0)
    write(root, "/proc/sys/kernel/random/boot_id", f"00000000-0000-4000-8000-{costume.number:012x}")
    write(root, "/proc/cmdline", "BOOT_IMAGE=/vmlinuz iommu=pt")
    write(root, "/proc/uptime", "1234567.89 1.0")
    write(root, "/proc/meminfo", "MemTotal:       2113409372 kB\nMemAvailable:   2000000000 kB")
    model = "model name\t: INTEL(R) XEON(R) PLATINUM 8568Y+"
    blocks = [f"processor\t: {t}\n{model}\nphysical id\t: {t // 4}\ncore id\t\t: {t % 4}" for t in range(8)]
    write(root, "/proc/cpuinfo", "\n\n".join(blocks))
    for node in (0, 1):
        write(root, f"/sys/devices/system/node/node{node}/cpulist", f"{node * 4}-{node * 4 + 3}")
        write(root, f"/sys/devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:  1056704686 kB")
    config = "CONFIG_DMABUF_MOVE_NOTIFY=y\nCONFIG_PCI_P2PDMA=y\nCONFIG_HSA_AMD_P2P=y"
    write(root, "/boot/config-5.15.0-105-generic", config)
    loaded = {"nvidia": ["nvidia", "nvidia_peermem"], "amd": ["amdgpu"], "none": []}[costume.vendor]
    modules = [*loaded, "ib_core", "ib_uverbs", costume.nic_driver]
    write(root, "/proc/modules", "\n".join(f"{name} 1234 0 - Live 0x0" for name in modules))
    if costume.vendor == "nvidia":
        line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"
        write(root, "/proc/driver/nvidia/version", line)
    if costume.vendor == "amd":
        write(root, "/sys/module/amdgpu/version", "6.12.12")


def slot(index: int) -> tuple[str, str, int]:
    """(PCI path of GPU `index`, PCI path of NIC `index`, NUMA node): one switch per pair, as in HGX machines."""
    bus = 0x10 * (index + 1)
    switch = f"devices/pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
    gpu_path = f"{switch}/0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0"
    nic_path = f"{switch}/0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0"
    return gpu_path, nic_path, 0 if index < 4 else 1


def pci_device(root: Path, path: str, files: dict[str, str | int], driver: str) -> str:
    """A function of the PCI tree; returns its address."""
    address = path.rpartition("/")[2]
    for name, content in files.items():
        write(root, f"/sys/{path}/{name}", content)
    link(root, f"/sys/bus/pci/devices/{address}", f"/sys/{path}")
    link(root, f"/sys/{path}/driver", f"/sys/bus/pci/drivers/{driver}")
    return address


def gpu(root: Path, costume: Costume, index: int) -> None:
    path, _, node = slot(costume.first_slot + index)
    files: dict[str, str | int] = {
        "numa_node": node,
        "current_link_width": 16,
        "max_link_width": 16,
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
    }
    if costume.vendor == "nvidia":
        address = pci_device(
            root, path, files | {"class": "0x030200", "vendor": "0x10de", "device": "0x2335"}, "nvidia"
        )
        uuid = recordings.nvidia_uuid(costume.number, index)
        text = f"Model: \t\t {costume.model}\nIRQ:   \t\t 100\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.99.00.01"
        write(root, f"/proc/driver/nvidia/gpus/{address}/information", text)
        return
    total = recordings.AMD_MEMORY_BYTES
    extra = {
        "class": "0x120000",
        "vendor": "0x1002",
        "device": "0x74a5",
        "mem_info_vram_total": total,
        "mem_info_vram_used": 297795584,
        "unique_id": f"{recordings.amd_unique(costume.number, index):016x}",
        "current_compute_partition": "SPX",
        "current_memory_partition": "NPS1",
        "vbios_version": "113-M3250101-102",
    }
    pci_device(root, path, files | extra, "amdgpu")


def kfd(root: Path, costume: Costume) -> None:
    """KFD's topology: two CPU nodes, then the GPUs, all joined by xGMI."""
    base = "/sys/devices/virtual/kfd/kfd/topology/nodes"
    link(root, "/sys/class/kfd", "/sys/devices/virtual/kfd")
    for node in (0, 1):
        write(root, f"{base}/{node}/gpu_id", 0)
        write(root, f"{base}/{node}/properties", "cpu_cores_count 64\nsimd_count 0")
    for index in range(costume.gpus):
        bus = 0x10 * (costume.first_slot + index + 1) + 3
        at = f"{base}/{index + 2}"
        write(root, f"{at}/gpu_id", 1000 + index)
        lines = ["cpu_cores_count 0", "simd_count 1216", "gfx_target_version 90402", f"location_id {bus << 8}"]
        lines += ["domain 0", f"unique_id {recordings.amd_unique(costume.number, index)}", "vendor_id 4098"]
        write(root, f"{at}/properties", "\n".join(lines))
        bank = f"heap_type 1\nsize_in_bytes {recordings.AMD_MEMORY_BYTES}\nflags 0"
        write(root, f"{at}/mem_banks/0/properties", bank)
        peers = [p for p in range(costume.gpus) if p != index]
        for number, peer in enumerate(peers):
            write(
                root,
                f"{at}/io_links/{number}/properties",
                f"type 11\nnode_from {index + 2}\nnode_to {peer + 2}\nweight 15",
            )
        write(root, f"{at}/io_links/{len(peers)}/properties", f"type 2\nnode_from {index + 2}\nnode_to 0\nweight 20")


def netdev_name(costume: Costume, index: int) -> str:
    return f"ib{index}" if costume.fabric == "infiniband" else f"ens{index + 1}f0np0"


def rdma_name(costume: Costume, index: int) -> str:
    return RDMA_NAMES[costume.nic_driver].format(i=index)


def nic_address(costume: Costume, index: int) -> str:
    return costume.rail_network.format(rail=index, host=costume.number + 1)


def nic(root: Path, costume: Costume, index: int) -> None:
    """A NIC with its interface and, unless plain Ethernet, its RDMA port."""
    _, path, node = slot(index)
    vendor, device = NIC_IDS[costume.nic_driver].split(":")
    files: dict[str, str | int] = {
        "class": "0x020700" if costume.fabric == "infiniband" else "0x020000",
        "vendor": f"0x{vendor}",
        "device": f"0x{device}",
        "numa_node": node,
        "current_link_width": 16,
        "max_link_width": 16,
        "current_link_speed": "32.0 GT/s PCIe",
        "max_link_speed": "32.0 GT/s PCIe",
    }
    pci_device(root, path, files, costume.nic_driver)
    name, up = netdev_name(costume, index), index not in costume.down and costume.ipoib == "up"
    kind = 32 if costume.fabric == "infiniband" else 1
    if costume.ipoib != "none":
        interface(root, name, folder=f"{path}/net", kind=kind, up=up, number=costume.number * 64 + index + 1)
        link(root, f"/sys/{path}/net/{name}/device", f"/sys/{path}")
    if costume.fabric != "ethernet":
        rdma_port(root, costume, index, path)


def interface(
    root: Path, name: str, *, folder: str, kind: int = 1, up: bool = True, speed: str = "400000", number: int = 0
) -> None:
    base = f"/sys/{folder}/{name}"
    link(root, f"/sys/class/net/{name}", base)
    write(root, f"{base}/address", f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}")
    write(root, f"{base}/mtu", 4092 if kind == 32 else 9000)
    write(root, f"{base}/operstate", "up" if up else "down")
    write(root, f"{base}/carrier", int(up))
    write(root, f"{base}/speed", speed if up else -1)
    write(root, f"{base}/type", kind)
    write(root, f"{base}/flags", "0x1003" if up else "0x1002")
    write(root, f"{base}/dev_port", 0)


def rdma_port(root: Path, costume: Costume, index: int, path: str) -> None:
    name, netdev = rdma_name(costume, index), netdev_name(costume, index)
    base, up = f"/sys/{path}/infiniband/{name}", index not in costume.down
    link(root, f"/sys/class/infiniband/{name}", base)
    link(root, f"{base}/device", f"/sys/{path}")
    low = costume.number * 64 + index + 1
    write(root, f"{base}/node_guid", f"0200:0000:0000:{low:04x}")
    write(root, f"{base}/fw_ver", "28.39.3004")
    write(root, f"/dev/infiniband/uverbs{index}", "")
    port = f"{base}/ports/1"
    infiniband = costume.fabric == "infiniband"
    write(root, f"{port}/link_layer", "InfiniBand" if infiniband else "Ethernet")
    state = "1: DOWN" if not up else "2: INIT" if costume.no_subnet_manager and infiniband else "4: ACTIVE"
    write(root, f"{port}/state", state)
    write(root, f"{port}/phys_state", "5: LinkUp" if up else "3: Disabled")
    write(root, f"{port}/rate", costume.rate)
    has_manager = infiniband and up and not costume.no_subnet_manager
    write(root, f"{port}/lid", hex(low) if has_manager else "0x0")
    write(root, f"{port}/sm_lid", "0x1" if has_manager else "0x0")
    write(root, f"{port}/counters/link_downed", 0)
    write(root, f"{port}/hw_counters/out_of_sequence", 0)
    for number, (gid, kind) in enumerate(gid_table(costume, index, low)):
        write(root, f"{port}/gids/{number}", gid)
        if gid.strip("0:"):
            write(root, f"{port}/gid_attrs/types/{number}", kind)
            write(root, f"{port}/gid_attrs/ndevs/{number}", "" if infiniband else netdev)


def gid_table(costume: Costume, index: int, low: int) -> list[tuple[str, str]]:
    empty = [("0000:0000:0000:0000:0000:0000:0000:0000", "")] * 4
    if costume.fabric == "infiniband":
        return [(f"{costume.subnet_prefix}:0200:0000:0000:{low:04x}", "IB/RoCE v1"), *empty]
    local = f"fe80:0000:0000:0000:0000:00ff:fe00:{low:04x}"
    a, b, c, d = (int(part) for part in nic_address(costume, index).split("."))
    mapped = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
    return [(local, "IB/RoCE v1"), (local, "RoCE v2"), (mapped, "IB/RoCE v1"), (mapped, "RoCE v2"), *empty]


def tools(folder: Path, costume: Costume) -> None:
    """The recorded tools of this host."""
    folder.mkdir(parents=True, exist_ok=True)
    addresses = dict(costume.management)
    if costume.fabric != "infiniband":
        addresses |= {netdev_name(costume, i): nic_address(costume, i) for i in range(costume.nics)}
    tool(folder, "ip", {"-j addr": recordings.ip_json(addresses)}, delay_s=0)
    tool(folder, "ldconfig", {"-p": recordings.LDCONFIG}, delay_s=0)
    rdma = [rdma_name(costume, i) for i in range(costume.nics)] if costume.fabric != "ethernet" else []
    tool(folder, "ibv_devinfo", {"": recordings.ibv_devinfo(rdma)}, delay_s=0)
    buses = [slot(costume.first_slot + i)[0].rpartition("/")[2] for i in range(costume.gpus)]
    if costume.vendor == "nvidia":
        answers = recordings.nvidia_smi(costume.number, costume.model, buses, rdma)
        tool(folder, "nvidia-smi", answers, delay_s=costume.tool_delay_s)
    if costume.vendor == "amd":
        answers = recordings.amd_smi(costume.number, costume.model, buses)
        tool(folder, "amd-smi", answers, delay_s=costume.tool_delay_s)


def tool(folder: Path, name: str, answers: Mapping[str, str | ToolOutput], *, delay_s: float) -> None:
    """A script that answers each argument line with its recording, and any other with exit code 2."""
    cases = []
    for number, (arguments, answer) in enumerate(answers.items()):
        output = answer if isinstance(answer, ToolOutput) else ToolOutput(exit_code=0, stdout=answer)
        recording, errors = folder / f".{name}.{number}", folder / f".{name}.{number}.err"
        recording.write_bytes(output.stdout.encode())
        errors.write_bytes(output.stderr.encode())
        said = f"cat {shlex.quote(str(recording))}; cat {shlex.quote(str(errors))} >&2; exit {output.exit_code or 0}"
        cases.append(f"  {shlex.quote(arguments)}) {said};;")
    wait = f"sleep {delay_s}" if delay_s else ":"
    script = ["#!/bin/sh", "PATH=/usr/bin:/bin", wait, 'case "$*" in', *cases, "  *) exit 2;;", "esac", ""]
    path = folder / name
    path.write_text("\n".join(script))
    path.chmod(0o755)


def dress_recording(folder: Path, raw: Raw, number: int) -> Dress:
    """A host whose files, links and tools are those of a recording, on an otherwise ordinary machine."""
    dress = Dress(folder / "root", folder / "tools")
    machine(dress.root, Costume(f"box{number}", number, vendor="none"))
    for path, target in raw.links.items():
        if not (dress.root / path.lstrip("/")).exists():
            link(dress.root, path, target)
    for path, text in raw.files.items():
        write(dress.root, path, text.rstrip("\n"))
    dress.tools.mkdir(parents=True)
    asked = {name: tool.argv for name, tool in wanted().tools.items()}
    answers: dict[str, dict[str, ToolOutput]] = {}
    for name, output in raw.tools.items():
        if name in asked and not output.problem:
            answers.setdefault(asked[name][0], {})[" ".join(asked[name][1:])] = output
    for name, outputs in answers.items():
        tool(dress.tools, name, outputs, delay_s=0)
    return dress
