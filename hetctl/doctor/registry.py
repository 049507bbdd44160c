"""All checks in the order in which a person should mend what they find, and how some of them are chosen."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.doctor import between, gpu, host, net, perf, process, rdma, software, ssh
from hetctl.doctor.check import Check, Level

# one cannot be mended before what stands above it
_ORDER = (
    *(
        "ssh.reach",
        "ssh.hostkey",
        "sw.interpreter",
        "host.name",
        "net.ifname",
        "net.",
        "ssh.",
        "lim.",
        "rdma.",
        "roce.",
    ),
    *("gpu.", "sw.", "env.", "host.", "perf.", "island."),
)
THEMES = ("ssh", "net", "rdma", "roce", "lim", "gpu", "sw", "env", "host", "perf", "island")
_MODULES = (ssh, net, rdma, process, gpu, software, host, perf, between)


def rank(identity: str) -> int:
    """Where a check stands in the order of mending, lower first."""
    exact = [i for i, word in enumerate(_ORDER) if word == identity]
    theme = [i for i, word in enumerate(_ORDER) if word.endswith(".") and identity.startswith(word)]
    return (exact or theme or [len(_ORDER)])[0]


CHECKS: tuple[Check, ...] = tuple(
    sorted((c for module in _MODULES for c in module.CHECKS), key=lambda check: rank(check.id))
)
BY_ID = {check.id: check for check in CHECKS}


def choose(*, level: Level, only: Sequence[str] = (), skip: Sequence[str] = ()) -> tuple[Check, ...]:
    """The quick checks and those of `level`, or exactly `only` (ids or themes), without `skip`. Raises ConfigError."""
    for word in (*only, *skip):
        if word not in BY_ID and word not in THEMES:
            hint = nearest(word, [*BY_ID, *THEMES])
            raise ConfigError(f"there is no check '{word}'", hint=hint)
    if only:
        found = [c for c in CHECKS if c.id in only or c.theme in only]
    else:
        found = [c for c in CHECKS if c.level in ("quick", level)]
    return tuple(c for c in found if c.id not in skip and c.theme not in skip)
