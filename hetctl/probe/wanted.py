"""What the program on a host is asked to read: the general part here, the rest from each vendor's own file."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetctl.comm.contract.values import encode
from hetctl.probe import port_fabric, remote
from hetctl.probe.raw import Options
from hetctl.probe.system import SETTINGS
from hetctl.probe.vendors import VENDORS
from hetctl.probe.vendors.base import COMPUTING, Tool
from hetctl.probe.vendors.foreign import UNUSUAL


@dataclass(frozen=True)
class Tree:
    """Of every entry of `folder` (a pattern): files, links and listings; see `Probe.tree` in remote.py."""

    folder: str
    files: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    non_zero: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProbeRequest:
    """The whole request, as plain values that travel as JSON."""

    files: tuple[str, ...]
    filtered: Mapping[str, str]
    folders: tuple[str, ...]
    trees: tuple[Tree, ...]
    tools: Mapping[str, Tool]
    tool_path: tuple[str, ...]
    openable: tuple[str, ...]
    environment: str
    secret: str  # in a variable's name: its value stays where it is
    login: str  # in a value: what of it does
    packages: tuple[str, ...]
    package_files: Mapping[str, str]
    package_libraries: tuple[str, ...]
    counters: tuple[str, ...]  # error counters, patterns: read a second time on demand
    counting_tools: Mapping[str, Tool]  # likewise


def program(options: Options) -> bytes:
    """The self-contained program, to be fed to `python3 -` on the host; it says so when that Python is too old."""
    return _BOOT.format(source=inspect.getsource(remote), request=request(options)).encode("ascii")


def request(options: Options) -> str:
    """The request as ASCII JSON."""
    want = wanted(thorough=options.thorough)
    if options.opinions:
        want = replace(want, tools={**want.tools, **{n: t for v in VENDORS for n, t in v.opinion_tools.items()}})
    return json.dumps({"options": encode(options), "want": encode(want)})


def light_request(options: Options) -> dict[str, Any]:
    """A request for the probe in this very process: files and calls only, no tool and no Python is started."""
    want = replace(wanted(), tools={}, trees=_trees()[:3], tool_path=())
    return {"options": {**encode(options), "describe": False}, "want": encode(want)}


# Parsed by any Python since 2.6: only behind the check is the program itself compiled.
_BOOT = """import sys
if sys.version_info < (3, 8):
    sys.stdout.write("hetctl-probe: python %d.%d.%d\\n" % sys.version_info[:3])
    sys.stdout.flush()
    sys.exit(3)
scope = {{"__name__": "hetctl_probe"}}
exec(compile({source!r}, "<hetctl-probe>", "exec"), scope)
scope["main"]({request!r})
"""


def wanted(*, thorough: bool = False) -> ProbeRequest:
    """The request for a host of any vendor; `thorough` adds what only a check-up needs."""
    return ProbeRequest(
        files=tuple(dict.fromkeys([*_FILES, *(file for vendor in VENDORS for file in vendor.files)])),
        filtered={
            "/proc/cpuinfo": "processor|model name|physical id|core id|cpu cores|CPU implementer|CPU part",
            "/boot/config-{release}": "CONFIG_(DMABUF_MOVE_NOTIFY|PCI_P2PDMA|HSA_AMD_P2P|DMA_SHARED_BUFFER)=",
            **dict.fromkeys(port_fabric.REPORTS, port_fabric.REPORT_LINES),
            "/proc/modules": "(" + "|".join([_MODULES, *(v.modules for v in VENDORS if v.modules)]) + ")",
        },
        folders=("/dev/infiniband", "/sys/class/iommu", "/sys/kernel/mm/memory_peers"),
        trees=_trees(),
        tools={
            **_tools(),
            **(_thorough_tools() if thorough else {}),
            **{name: tool for vendor in VENDORS for name, tool in vendor.tools.items()},
        },
        tool_path=("/opt/amazon/efa/bin", *(folder for vendor in VENDORS for folder in vendor.tool_path)),
        openable=("/dev/infiniband/*", "/dev/kfd", "/var/run/docker.sock"),
        environment="(" + "|".join([_VARIABLES, *(p for v in VENDORS for p in v.environment)]) + ")[A-Z0-9_]*",
        secret="KEY|TOKEN|SECRET|PASS|CRED|AUTH",
        login=r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)",
        packages=_PACKAGES + tuple(package for vendor in VENDORS for package in vendor.packages),
        package_files={
            "torch/version.py": r"(__version__|cuda|hip|rocm|xpu|git_version)\b",
            "nvidia/nccl/include/nccl.h": r"#define NCCL_(MAJOR|MINOR|PATCH)\b",
        },
        package_libraries=("torch/lib/lib[nr]ccl*.so*", "nvidia/nccl/lib/libnccl.so*"),
        counters=tuple(f"/sys/class/infiniband/*/ports/*/{file}" for file in _GROWING),
        counting_tools=port_fabric.COUNTING_TOOLS,
    )


def _trees() -> tuple[Tree, ...]:
    pci_files = _PCI_FILES + tuple(file for vendor in VENDORS for file in vendor.pci_files)
    rdma = "/sys/class/infiniband"
    return (
        Tree(
            "/sys/bus/pci/devices",
            files=pci_files,
            links=("", "driver", "physfn"),
            only=("class", "0x02", *COMPUTING),  # network, and what may compute
        ),
        Tree("/sys/class/net", files=_NET_FILES, links=("", *_DEVICE_LINKS, "master", "lower_*")),
        Tree(rdma, files=_RDMA_FILES, links=_DEVICE_LINKS, folders=("device/net",)),
        Tree(rdma + "/*/ports", files=_PORT_FILES, non_zero=("gids", "gid_attrs/types", "gid_attrs/ndevs")),
        Tree(rdma + "/*/ports", non_zero=("pkeys",)),
        Tree("/sys/bus/pci/devices", files=("class", "vendor", "device"), links=("physfn",), only=UNUSUAL),
        Tree("/sys/class/cxi", files=("device/properties/speed", "device/properties/link"), links=_DEVICE_LINKS),
        *(Tree(folder, files=files) for vendor in VENDORS for folder, files in vendor.trees.items()),
    )


def _tools() -> dict[str, Tool]:
    libraries = "|".join(
        ["lib(ibverbs|rdmacm|mlx5|mlx4|bnxt_re|ionic|irdma|efa|rxe|siw|ucp|fabric)", *_vendor_libraries()]
    )
    return {
        "ibv_devinfo": Tool(("ibv_devinfo",)),
        "fi_info": Tool(("fi_info", "-l")),
        "ip": Tool(("ip", "-j", "addr")),
        "ip text": Tool(("ip", "-o", "addr"), instead_of="ip"),
        "ldconfig": Tool(("ldconfig", "-p"), keep=libraries),
        "docker": Tool(("docker", "--version")),
        "podman": Tool(("podman", "--version")),
        "apptainer": Tool(("apptainer", "--version")),
        "singularity": Tool(("singularity", "--version")),
    }


def _thorough_tools() -> dict[str, Tool]:
    log = "|".join(vendor.kernel_log for vendor in VENDORS if vendor.kernel_log)
    return {
        "ip rule": Tool(("ip", "-j", "rule")),
        **port_fabric.TOOLS,
        "dmesg": Tool(("dmesg",), keep=log),
        "lspci": Tool(("lspci", "-vv"), keep=r"^[0-9a-fA-F:.]+ .*bridge|ACSCtl"),
    }


def _vendor_libraries() -> list[str]:
    return [vendor.libraries for vendor in VENDORS if vendor.libraries]


_FILES = (
    *SETTINGS.values(),
    "/etc/os-release",
    "/etc/machine-id",
    "/.dockerenv",
    "/run/.containerenv",
    "/run/systemd/container",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/osrelease",
    "/proc/sys/kernel/random/boot_id",
    "/proc/meminfo",
    "/proc/uptime",
    "/proc/swaps",
    "/proc/net/if_inet6",
    "/proc/net/bonding/*",
    "/etc/libibverbs.d/*.driver",
    "/sys/devices/system/node/node*/cpulist",
    "/sys/devices/system/node/node*/meminfo",
    "/sys/module/ib_core/version",
    "/sys/module/mlx5_core/version",
    "/sys/module/bnxt_re/version",
    "/sys/module/ionic/version",
    "/sys/module/irdma/version",
    "/sys/module/efa/version",
)
_PCI_FILES = (
    *("class", "vendor", "device", "subsystem_vendor", "subsystem_device", "numa_node", "local_cpulist"),
    *("current_link_width", "current_link_speed", "max_link_width", "max_link_speed", "iommu_group/type"),
)
_NET_FILES = (
    *("address", "mtu", "operstate", "carrier", "carrier_changes", "speed", "type", "flags", "dev_port"),
    "bonding/slaves",
)
_DEVICE_LINKS = ("device", "device/driver", "device/physfn")
_RDMA_FILES = ("node_guid", "node_type", "fw_ver", "hca_type", "board_id", "sys_image_guid")
_COUNTERS = (
    *("symbol_error", "link_downed", "port_rcv_errors", "link_error_recovery", "local_link_integrity_errors"),
    *("excessive_buffer_overrun_errors", "port_xmit_discards", "port_xmit_wait", "port_rcv_constraint_errors"),
    *("port_xmit_constraint_errors", "VL15_dropped"),
)
_HARDWARE_COUNTERS = (
    *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "np_cnp_sent"),
    *("rp_cnp_handled", "roce_slow_restart", "tx_roce_discards", "rx_roce_discards", "np_ecn_marked_roce_packets"),
)
_GROWING = (*("counters/" + name for name in _COUNTERS), *("hw_counters/" + name for name in _HARDWARE_COUNTERS))
_PORT_FILES = (
    *("state", "phys_state", "rate", "link_layer", "lid", "sm_lid", "cap_mask", *port_fabric.PORT_FILES),
    *("counters/" + name for name in _COUNTERS),
    *("hw_counters/" + name for name in _HARDWARE_COUNTERS),
)
_MODULES = "ib_|rdma|mlx|bnxt|ionic|irdma|iw_|efa|cxi|siw|gdrdrv"
_VARIABLES = "UCX|FI_|GLOO|TORCH|TRITON|PYTORCH|OMP|MKL|LD_LIBRARY_PATH|SLURM_JOB"
_PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "hetctl", "flash_attn", "nixl"),
    *("mooncake_transfer_engine", "mooncake_transfer_engine_cuda13", "mooncake_transfer_engine_non_cuda"),
    *("mooncake_transfer_engine_rocm", "transformer_engine"),
)
