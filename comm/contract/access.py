"""How a host is entered and what runs there: what an inventory says of one host, carried on by cluster.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Access:
    """Where SSH connects and as whom, which Python, which environment. `address` None is this machine, no SSH.

    What is None is left to `~/.ssh/config` and its defaults.
    """

    address: str | None = None  # an alias of ~/.ssh/config, a name, or an IP address
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None  # [user@]host[:port], several joined by commas
    python: str = "python3"
    prefix: tuple[str, ...] = ()  # enters a container there: docker exec -i NAME
    env: Mapping[str, str | None] = field(default_factory=dict)  # None: the value of whoever launches
    exclude_nics: tuple[str, ...] = ()
    gpus: tuple[int, ...] | None = None  # the devices to use, None for all

    @property
    def local(self) -> bool:
        """Whether this machine is meant, without SSH."""
        return self.address is None
