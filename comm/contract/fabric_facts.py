"""What an RDMA port and its fabric say beyond the link itself: partitions, managers, flow control. None is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SubnetManager:
    """One subnet manager of an InfiniBand subnet. Of several, the highest priority is master, then the lowest GUID."""

    lid: int
    guid: str | None = None
    priority: int | None = None  # 0 to 15
    state: str | None = None  # master, standby, discovering, not active


@dataclass(frozen=True)
class PortFabric:
    """One RDMA port as its fabric sees it."""

    lmc: int | None = None  # InfiniBand: the port has 2**lmc LIDs, from its own on
    enabled_mtu: int | None = None  # the largest that the port may use; what it uses is NicFacts.rdma_mtu
    pkeys: tuple[int, ...] | None = None  # partition keys by index, 0 for an empty entry; bit 15 is full membership
    managers: tuple[SubnetManager, ...] | None = None  # those of its subnet that could be asked after
    pfc: tuple[int, ...] | None = None  # priorities with flow control of their own
    watched_s: float | None = None  # between the two readings behind NicFacts.growing
    unasked: Mapping[str, str] = field(default_factory=dict)  # managers, pfc, pauses -> why nobody could tell

    @property
    def full_partitions(self) -> frozenset[int]:
        """The partitions (keys without bit 15) in which the port may talk to everybody."""
        return frozenset(key & 0x7FFF for key in self.pkeys or () if key & 0x8000 and key & 0x7FFF)


@dataclass(frozen=True)
class FabricReport:
    """What ibdiagnet wrote when somebody last ran it on this host: stage -> (warnings, errors)."""

    path: str
    written: str | None = None  # its own words
    stages: Mapping[str, tuple[int, int]] = field(default_factory=dict)
