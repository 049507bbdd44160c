"""All checks in the order in which a person should mend what they find, and how some of them are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.doctor import between, flow, gpu, host, net, paths, perf, process, rdma, software, ssh, subnet
from hetctl.doctor.check import Check, Level

# beginnings of ids: one cannot be mended before what stands above it
_ORDER = (
    *("ssh.reach", "ssh.hostkey", "sw.interpreter", "host.name", "net.ifname", "net.", "ssh.", "lim."),
    *("rdma.port_state", "rdma.sm", "rdma.lid", "rdma.pkey", "rdma.", "roce."),
    *("gpu.", "sw.", "env.", "host.", "perf.", "island."),
)
THEMES = ("ssh", "net", "rdma", "roce", "lim", "gpu", "sw", "env", "host", "perf", "island")
_MODULES = (ssh, net, rdma, subnet, flow, paths, process, gpu, software, host, perf, between)


def rank(identity: str) -> int:
    """Where a check stands in the order of mending, lower first."""
    return next((place for place, word in enumerate(_ORDER) if identity.startswith(word)), len(_ORDER))


CHECKS: tuple[Check, ...] = tuple(
    sorted((c for module in _MODULES for c in module.CHECKS), key=lambda check: rank(check.id))
)
BY_ID = {check.id: check for check in CHECKS}


class Named(Protocol):
    """What is chosen by its id or its theme: a check here, a claim in validate."""

    @property
    def id(self) -> str: ...
    @property
    def theme(self) -> str: ...


N = TypeVar("N", bound=Named)


def pick(what: str, every: Sequence[N], words: Sequence[str]) -> tuple[N, ...]:
    """Those of these ids or themes. Raises ConfigError, with what was perhaps meant."""
    known = {one.id for one in every} | {one.theme for one in every}
    for word in words:
        if word not in known:
            raise ConfigError(f"there is no {what} '{word}'", hint=nearest(word, known))
    return tuple(one for one in every if one.id in words or one.theme in words)


def choose(*, level: Level, only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[Check, ...]:
    """The quick checks and those of `level`, or exactly `only` (ids or themes), without `skip`. Raises ConfigError."""
    found = pick("check", CHECKS, only) if only else tuple(c for c in CHECKS if c.level in ("quick", level))
    skipped = pick("check", CHECKS, skip)
    return tuple(c for c in found if c not in skipped)
