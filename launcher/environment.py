"""From a plan to what each rank's process is started with: arguments, environment, and a reason for each value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetctl.comm.natives import NATIVES
from hetctl.comm.placement import VARIABLE as PLACEMENT_VARIABLE
from hetctl.comm.placement import PlacedBridge, PlacedIsland, Placement
from hetctl.comm.plan import Plan, PlannedRank


@dataclass(frozen=True)
class Setting:
    """One environment variable and why it has its value."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class HostShape:
    """What the settings of a host's ranks depend on, beside the plan."""

    name: str
    cores: int
    device_type: str  # cuda or cpu: what the ranks of this host really use
    master_address: str
    socket_interface: str | None  # for gloo; None: let it choose


def placement_of(plan: Plan, runs: str | None, *, verify_bridge: bool = False) -> Placement:
    """The placement slice of a plan. `runs` is the native library an emulation really has, None on real islands."""
    islands = tuple(
        PlacedIsland(i.name, i.vendor, _torch_backend(i.vendor, runs), i.ranks) for i in plan.islands if i.ranks
    )
    bridges = tuple(PlacedBridge(b.islands, b.transport) for b in plan.bridges)
    return Placement(islands, bridges, tuple(r.host for r in plan.ranks), verify_bridge)


def rank_settings(plan: Plan, rank: PlannedRank, host: HostShape, *, files: dict[str, Path]) -> tuple[Setting, ...]:
    """Everything a rank's process gets in its environment. `files` maps variable names to files on that host."""
    local = [r.rank for r in plan.ranks if r.host == rank.host]
    threads = max(1, host.cores // len(local))
    settings = [
        Setting("RANK", str(rank.rank), "from the plan"),
        Setting("WORLD_SIZE", str(plan.world_size), "ranks in the plan"),
        Setting("LOCAL_RANK", str(local.index(rank.rank)), "order among this host's ranks"),
        Setting("LOCAL_WORLD_SIZE", str(len(local)), "ranks on this host"),
        Setting("MASTER_ADDR", host.master_address, "where the run's store listens"),
        Setting("TORCHELASTIC_USE_AGENT_STORE", "True", "the store lives beside the agent, never in a rank"),
        Setting("OMP_NUM_THREADS", str(threads), f"{host.cores} cores shared by {len(local)} ranks"),
        Setting("HETCTL_DEVICE_TYPE", host.device_type, "what this host's ranks compute on"),
        Setting("HETCTL_DEVICE_INDEX", str(rank.device), "the plan's device of this rank"),
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


__all__ = ["PLACEMENT_VARIABLE", "HostShape", "Setting", "placement_of", "rank_settings"]
