"""All claims in the order in which they are judged (reading, computing, talking, training), and how some are chosen."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.validate import computing, discovery, talking
from hetctl.validate.claims import Claim

CLAIMS: tuple[Claim, ...] = (
    *discovery.CLAIMS,
    *computing.CLAIMS[:1],  # wrong numbers would explain what follows
    *talking.CLAIMS,
    *computing.CLAIMS[1:],
)
BY_ID = {claim.id: claim for claim in CLAIMS}


def choose(only: Sequence[str] = ()) -> tuple[Claim, ...]:
    """All claims, or those of these ids or themes. Raises ConfigError."""
    themes = {claim.id.partition(".")[0] for claim in CLAIMS}
    for word in only:
        if word not in BY_ID and word not in themes:
            raise ConfigError(f"there is no claim '{word}'", hint=nearest(word, [*BY_ID, *themes]))
    return tuple(c for c in CLAIMS if not only or c.id in only or c.id.partition(".")[0] in only)
