"""What each rank's process is started with: its environment, with a reason for each value, and its placement. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.natives import NATIVES
from hetctl.comm.placement import PlacedBridge, PlacedIsland, Placement
from hetctl.comm.plan import Bridge


@dataclass(frozen=True)
class Setting:
    """One environment variable and why it has its value."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Seat:
    """Where a rank runs: its host and its device there."""

    rank: int
    host: str
    device: int


@dataclass(frozen=True)
class PlannedPlace:
    """An island's name, the vendor it stands for, and its ranks."""

    name: str
    vendor: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class HostShape:
    """What the settings of a host's ranks depend on, beside the seats."""

    name: str
    cores: int
    device_type: str  # cuda or cpu: what the ranks of this host really use
    master_address: str
    socket_interface: str | None  # for gloo; None: let it choose
    code_path: str  # PYTHONPATH that finds hetctl and its entry point


def device_type(runs: str | None) -> str:
    """The torch device type of an emulation's ranks; real islands are on accelerators."""
    return "cpu" if runs == "gloo" else "cuda"


def placement_of(
    islands: Sequence[PlannedPlace],
    bridges: Sequence[Bridge],
    seats: Sequence[Seat],
    *,
    runs: str | None,
    verify_bridge: bool = False,
) -> Placement:
    """What ranks must know. `runs` is the native library an emulation really has, None on real islands.

    Raises ConfigError where a forced transport is none that the bridge can take.
    """
    placed = tuple(PlacedIsland(i.name, i.vendor, _torch_backend(i.vendor, runs), i.ranks) for i in islands if i.ranks)
    ways = tuple(PlacedBridge(b.islands, b.transport, b.forced) for b in bridges)
    placement = Placement(placed, ways, tuple(s.host for s in seats), verify_bridge)
    for way in ways:
        placement.carrier(*way.islands)
    return placement


def rank_settings(
    seats: Sequence[Seat], seat: Seat, host: HostShape, *, files: Mapping[str, Path]
) -> tuple[Setting, ...]:
    """Everything a rank's process gets in its environment. `files` maps variable names to files on that host."""
    local = [s.rank for s in seats if s.host == seat.host]
    threads = max(1, host.cores // len(local))
    settings = [
        Setting("RANK", str(seat.rank), "from the plan"),
        Setting("WORLD_SIZE", str(len(seats)), "ranks in the plan"),
        Setting("LOCAL_RANK", str(local.index(seat.rank)), "order among this host's ranks"),
        Setting("LOCAL_WORLD_SIZE", str(len(local)), "ranks on this host"),
        Setting("MASTER_ADDR", host.master_address, "where the run's store listens"),
        Setting("TORCHELASTIC_USE_AGENT_STORE", "True", "the store lives beside the agent, never in a rank"),
        Setting("OMP_NUM_THREADS", str(threads), f"{host.cores} cores shared by {len(local)} ranks"),
        Setting("HETCTL_DEVICE_TYPE", host.device_type, "what this host's ranks compute on"),
        Setting("HETCTL_DEVICE_INDEX", str(seat.device), "the plan's device of this rank"),
        Setting("PYTHONPATH", host.code_path, "where hetctl's code and its entry point for torch are"),
        Setting("PYTHONUNBUFFERED", "1", "logs are read while they grow"),
    ]
    if host.socket_interface:
        why = "the interface of the data address"
        settings.append(Setting("GLOO_SOCKET_IFNAME", host.socket_interface, why))
    settings += [Setting(name, str(path), "a file of this run") for name, path in files.items()]
    return tuple(settings)


def _torch_backend(vendor: str, runs: str | None) -> str:
    if runs is not None:
        return "gloo" if runs == "gloo" else "nccl"
    return NATIVES[vendor].torch_backend
