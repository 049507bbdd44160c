"""The one table of network kinds, best first: what people call each, and who can use it.

A further kind is one row here, and its word in `NetworkKind`, which files are checked against.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hetctl.comm.contract.facts import HostFacts, Library
from hetctl.comm.contract.natives import NATIVES

NetworkKind = Literal["infiniband", "roce", "cxi", "efa", "ethernet", "host"]


@dataclass(frozen=True)
class NetworkRow:
    """One kind of network. One with `driver` is reached through libfabric: its verbs are not what engines need."""

    word: str  # what a person calls it
    short: str  # how the names of its networks begin
    verbs: bool = False  # the engines of bridges, and NCCL by itself, use its RDMA ports
    driver: str = ""  # the kernel driver whose ports are of this kind, whatever else they look like
    pci_ids: tuple[str, ...] = ()  # beginnings of vendor:device, for drivers of other names
    ip: str = ""  # what carries IP beside it
    install: str = ""  # a line to paste: libfabric and the native library's plugin for it

    @property
    def plugin(self) -> bool:
        """Whether native libraries need a plugin for it."""
        return bool(self.driver)


NETWORKS: dict[NetworkKind, NetworkRow] = {
    "infiniband": NetworkRow("InfiniBand", "ib", verbs=True),
    "roce": NetworkRow("RoCE", "roce", verbs=True),
    "cxi": NetworkRow(
        "HPE Slingshot",
        "cxi",
        driver="cxi_ss1",
        pci_ids=("17db:0501", "1590:037"),
        ip="its hsn interfaces",
        install="./configure --with-libfabric=LIBFABRIC --with-cuda=CUDA && sudo make install && sudo ldconfig"
        "  # in a release of github.com/aws/aws-ofi-nccl, on {host}; AMD: --with-rocm=/opt/rocm",
    ),
    "efa": NetworkRow(
        "AWS EFA",
        "efa",
        driver="efa",
        pci_ids=("1d0f:efa",),
        ip="its ENA interface",
        install="curl https://efa-installer.amazonaws.com/aws-efa-installer-latest.tar.gz | tar xz"
        " && cd aws-efa-installer && sudo ./efa_installer.sh -y  # on {host}",
    ),
    "ethernet": NetworkRow("Ethernet", "net"),
    "host": NetworkRow("one host", "host"),
}
RDMA_KINDS = tuple(kind for kind, row in NETWORKS.items() if row.verbs)
PLUGIN_KINDS = tuple(kind for kind, row in NETWORKS.items() if row.plugin)


def kind_of_port(driver: str | None, pci_id: str | None) -> NetworkKind | None:
    """The kind of network that a port always reaches, by its driver or PCI id; None where its link layer decides."""
    for kind, row in NETWORKS.items():
        if row.plugin and (driver == row.driver or (pci_id or "").startswith(row.pci_ids)):
            return kind
    return None


def plugin_libraries(facts: HostFacts, vendor: str) -> list[Library]:
    """The libraries of a host through which a vendor's native library uses libfabric, its own name's first."""
    pattern = NATIVES[vendor].fabric_library if vendor in NATIVES else ""
    found = [lib for lib in facts.rdma.libraries or () if pattern and re.match(pattern, lib.name)]
    return sorted(found, key=lambda lib: len(lib.name))


def plugin_missing(facts: HostFacts, vendor: str, environment: Mapping[str, object]) -> str:
    """Why a vendor's native library cannot use libfabric on a host; '' where it can.

    What is not known counts as missing: the library would fall back to sockets without a word.
    """
    native = NATIVES.get(vendor)
    if native is None or not native.fabric_library:
        return f"no plugin for it is known for {native.library if native else vendor}"
    if "NCCL_NET_PLUGIN" in {**environment, **facts.system.environment}:
        return ""  # a person says where it is
    if facts.rdma.libraries is None:
        return "whether its plugin is installed is unknown: ldconfig gave no answer"
    if plugin_libraries(facts, vendor):
        return ""
    return f"{native.library}'s plugin for it ({native.fabric_library}*.so) is not on the library path"
