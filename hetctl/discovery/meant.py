"""The hosts that a command is about: what a person names, or what the engine holds that `--from` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.units import listed
from hetctl.discovery.fabric import Report
from hetctl.discovery.inventory import DEFAULT_FILE, Inventory, resolve
from hetctl.discovery.kubernetes_nodes import from_kubernetes


def meant_hosts(hosts: Sequence[str], file: Path | None, engine: str | None) -> tuple[Inventory, tuple[Report, ...]]:
    """The hosts, and a report of each that cannot be entered: what its node's labels say. Raises HetctlError."""
    if engine != "kubernetes":
        return resolve(hosts, file, engine=engine), ()
    named = bool(hosts) or file is not None or DEFAULT_FILE.exists()
    return from_kubernetes(resolve(hosts, file) if named else None)


def enterable_hosts(hosts: Sequence[str], file: Path | None, engine: str | None) -> Inventory:
    """The hosts, all of which can be entered. Raises HetctlError."""
    meant, closed = meant_hosts(hosts, file, engine)
    if closed:
        raise ConfigError(
            f"no image is named for {listed([report.name for report in closed], 8)}: nothing can be run there",
            hint="kubernetes: {image: ...} in inventory.yaml; see docs/how-to/kubernetes.md",
        )
    return meant
