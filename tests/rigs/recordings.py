"""What the tools of a dressed host print: written from the formats' documented shapes, current generations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

NVIDIA_MEMORY_MIB = 143771
AMD_MEMORY_BYTES = 274861129728
LDCONFIG = """\
	librdmacm.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/librdmacm.so.1
	libmlx5.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libmlx5.so.1
	libibverbs.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libibverbs.so.1
	libc.so.6 (libc6,x86-64) => /lib/x86_64-linux-gnu/libc.so.6
"""


def nvidia_uuid(host: int, index: int) -> str:
    return f"GPU-{host:08x}-0000-4000-8000-{index:012x}"


def amd_unique(host: int, index: int) -> int:
    return 0xA0000000_00000000 + (host << 8) + index + 1


def nvidia_smi(host: int, product: str, buses: Sequence[str], rdma: Sequence[str]) -> dict[str, str]:
    """Argument line -> output of nvidia-smi (driver 570) for GPUs at `buses`."""
    uuids = [nvidia_uuid(host, i) for i in range(len(buses))]
    heads = [f"GPU {i}: {product} (UUID: {uuid})" for i, uuid in enumerate(uuids)]
    links = "\n".join(f"\t Link {n}: 26.562 GB/s" for n in range(18))
    return {
        "-q -x": nvidia_xml(product, buses, uuids),
        "--query-gpu=uuid,compute_cap --format=csv,noheader": "".join(f"{uuid}, 9.0\n" for uuid in uuids),
        "topo -m": topology(len(buses), rdma),
        "nvlink -s": "\n".join(f"{head}\n{links}" for head in heads) + "\n",
        "-L": "\n".join(heads) + "\n",
    }


def nvidia_xml(product: str, buses: Sequence[str], uuids: Sequence[str]) -> str:
    gpus = "".join(_nvidia_gpu(product, bus, uuid, i) for i, (bus, uuid) in enumerate(zip(buses, uuids, strict=True)))
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
	<timestamp>Mon Jun  2 10:00:00 2025</timestamp>
	<driver_version>570.124.06</driver_version>
	<cuda_version>12.8</cuda_version>
	<attached_gpus>{len(buses)}</attached_gpus>
{gpus}</nvidia_smi_log>
"""


def _nvidia_gpu(product: str, bus: str, uuid: str, index: int) -> str:
    return f"""	<gpu id="0000{bus.upper()}">
		<product_name>{product}</product_name>
		<product_brand>NVIDIA</product_brand>
		<product_architecture>Hopper</product_architecture>
		<mig_mode><current_mig>Disabled</current_mig><pending_mig>Disabled</pending_mig></mig_mode>
		<mig_devices>None</mig_devices>
		<serial>16500240{index:05d}</serial>
		<uuid>{uuid}</uuid>
		<minor_number>{index}</minor_number>
		<vbios_version>96.00.99.00.01</vbios_version>
		<gpu_recovery_action>None</gpu_recovery_action>
		<pci>
			<pci_bus_id>0000{bus.upper()}</pci_bus_id>
			<pci_gpu_link_info>
				<pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>5</current_link_gen></pcie_gen>
				<link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>
			</pci_gpu_link_info>
			<replay_counter>0</replay_counter>
		</pci>
		<clocks_event_reasons>
			<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
			<clocks_event_reason_sw_power_cap>Not Active</clocks_event_reason_sw_power_cap>
			<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
		</clocks_event_reasons>
		<fb_memory_usage>
			<total>{NVIDIA_MEMORY_MIB} MiB</total><reserved>613 MiB</reserved><used>0 MiB</used><free>143158 MiB</free>
		</fb_memory_usage>
		<ecc_mode><current_ecc>Enabled</current_ecc><pending_ecc>Enabled</pending_ecc></ecc_mode>
		<ecc_errors>
			<volatile>
				<sram_correctable>0</sram_correctable>
				<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
				<sram_uncorrectable_secded>0</sram_uncorrectable_secded>
				<dram_correctable>0</dram_correctable>
				<dram_uncorrectable>0</dram_uncorrectable>
			</volatile>
		</ecc_errors>
		<remapped_rows>
			<remapped_row_corr>0</remapped_row_corr><remapped_row_unc>0</remapped_row_unc>
			<remapped_row_pending>No</remapped_row_pending><remapped_row_failure>No</remapped_row_failure>
		</remapped_rows>
		<temperature><gpu_temp>31 C</gpu_temp></temperature>
		<gpu_power_readings>
			<average_power_draw>76.50 W</average_power_draw><instant_power_draw>76.71 W</instant_power_draw>
			<current_power_limit>700.00 W</current_power_limit>
		</gpu_power_readings>
		<processes></processes>
		<fabric><state>Completed</state><status>Success</status></fabric>
	</gpu>
"""


def topology(gpus: int, rdma: Sequence[str]) -> str:
    """`nvidia-smi topo -m`: GPU i and NIC i below one switch, the first four of each on NUMA node 0."""
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(len(rdma))]
    header = "\t" + "\t".join(names) + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    rows = [f"\x1b[4m{header}\x1b[0m"]
    for a in names:
        cells = [_cell(a, b) for b in names]
        affinity = "\t0-3\t0\t\tN/A" if a.startswith("GPU") else ""
        rows.append(f"{a}\t" + "\t".join(cells) + affinity)
    legend = (
        "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe ...\n  PIX  = at most a single PCIe bridge\n"
    )
    nics = "\nNIC Legend:\n\n" + "".join(f"  NIC{i}: {name}\n" for i, name in enumerate(rdma)) if rdma else ""
    return "\n".join(rows) + "\n" + legend + nics + "\n"


def _cell(a: str, b: str) -> str:
    if a == b:
        return " X "
    if a.startswith("GPU") and b.startswith("GPU"):
        return "NV18"
    x, y = int(a[3:]), int(b[3:])
    if x == y:
        return "PIX"
    return "NODE" if (x < 4) == (y < 4) else "SYS"


def amd_smi(host: int, product: str, buses: Sequence[str]) -> dict[str, str]:
    """Argument line -> output of amd-smi (ROCm 7: `gpu_data`) for GPUs at `buses`."""
    every = list(enumerate(buses))
    return {
        "static --json": json.dumps({"gpu_data": [_amd_static(host, product, i, bus) for i, bus in every]}, indent=4),
        "metric --json": json.dumps({"gpu_data": [_amd_metric(i) for i, _ in every]}, indent=4),
        "process --json": json.dumps(
            {"gpu_data": [{"gpu": i, "process_list": [{"process_info": _IDLE}]} for i, _ in every]}
        ),
        "topology --json": json.dumps({"gpu_data": [_amd_links(i, buses) for i, _ in every]}),
    }


_IDLE = "No running processes detected"


def _amd_static(host: int, product: str, index: int, bus: str) -> Mapping[str, object]:
    return {
        "gpu": index,
        "asic": {
            "market_name": "AMD Instinct MI300 Series",
            "vendor_id": "0x1002",
            "asic_serial": f"0x{amd_unique(host, index):016X}",
            "target_graphics_version": "gfx942",
        },
        "bus": {
            "bdf": bus,
            "max_pcie_width": 16,
            "max_pcie_speed": {"value": 32, "unit": "GT/s"},
            "pcie_interface_version": "Gen 5",
        },
        "ifwi": {"name": "AMD MI325X", "version": "022.040.003.043.000001"},
        "limit": {"max_power": {"value": 1000, "unit": "W"}, "socket_power_limit": {"value": 1000, "unit": "W"}},
        "driver": {"name": "amdgpu", "version": "6.12.12"},
        "board": {"product_name": product, "product_serial": f"6925240{index:05d}", "model_number": "102-G30218-00"},
        "partition": {"accelerator_partition": "SPX", "memory_partition": "NPS1", "partition_id": 0},
        "numa": {"node": 0 if index < 4 else 1, "affinity": 0},
        "vram": {"type": "HBM3E", "size": {"value": AMD_MEMORY_BYTES // 2**20, "unit": "MB"}},
    }


def _amd_metric(index: int) -> Mapping[str, object]:
    total = AMD_MEMORY_BYTES // 2**20
    return {
        "gpu": index,
        "power": {"socket_power": {"value": 142, "unit": "W"}},
        "temperature": {"edge": "N/A", "hotspot": {"value": 40, "unit": "C"}},
        "pcie": {"width": 16, "speed": {"value": 32, "unit": "GT/s"}, "replay_count": 0},
        "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": 0, "total_deferred_count": 0},
        "mem_usage": {
            "total_vram": {"value": total, "unit": "MB"},
            "used_vram": {"value": 284, "unit": "MB"},
            "free_vram": {"value": total - 284, "unit": "MB"},
        },
    }


def _amd_links(index: int, buses: Sequence[str]) -> Mapping[str, object]:
    links = [
        {"gpu": i, "bdf": bus, "weight": 15, "link_type": "SELF" if i == index else "XGMI", "num_hops": 1}
        for i, bus in enumerate(buses)
    ]
    return {"gpu": index, "bdf": buses[index], "links": links}


def ip_json(addresses: Mapping[str, str]) -> str:
    """`ip -j addr` of a loopback and the named interfaces."""
    rows = [{"ifname": "lo", "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8, "scope": "host"}]}]
    for name, address in addresses.items():
        entry = {"family": "inet", "local": address, "prefixlen": 24, "scope": "global"}
        rows.append({"ifname": name, "addr_info": [entry]})
    return json.dumps(rows)


def ibv_devinfo(devices: Sequence[str]) -> str:
    blocks = [
        f"hca_id:\t{name}\n\ttransport:\t\t\tInfiniBand (0)\n\tfw_ver:\t\t\t\t28.39.3004\n\tphys_port_cnt:\t\t\t1\n"
        "\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\tmax_mtu:\t\t4096 (5)\n\t\t\tactive_mtu:\t\t4096 (5)\n"
        for name in devices
    ]
    return "\n".join(blocks)
