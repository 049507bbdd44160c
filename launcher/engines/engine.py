"""What an engine is to hetctl: a way to run commands on hosts that it holds. SSH is one, and so is this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hetctl.comm.contract.cluster import Access
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import Shell


class Place(Protocol):
    """A host, of a cluster or of an inventory."""

    @property
    def name(self) -> str: ...

    @property
    def access(self) -> Access | None: ...


class Engine(Protocol):
    """Enters hosts. Called from several threads at a time."""

    def check(self, places: Sequence[Place], run: str | None, say: Callable[[str], None]) -> None:
        """Take what these hosts' ranks need for a run (its identity), or (None) what it takes to enter them.

        Raises HetctlError naming hosts that it does not hold or give. What it waits for it has `say` tell a person.
        """

    def open(self, place: Place, deadline: Deadline) -> Shell:
        """A shell on that host. Raises ShellError."""

    def address(self, place: Place, interface: str | None) -> tuple[str, str] | None:
        """Where ranks talk on a host that is held, if it can be at that interface: the address, and the interface.

        None: as its cluster file says, since hosts keep their addresses.
        """
        return None

    def close(self) -> None:
        """Let go of what it took to enter them."""
