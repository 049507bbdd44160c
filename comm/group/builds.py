"""Whether the ranks of a job can work together: one hetctl for what they tell each other, one torch in each island."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import torch

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.placement import Placement
from hetctl.comm.operation.work import PrefixStore, Store


def check_builds(store: Store, rank: int, placement: Placement) -> None:
    """Raise ConfigError where this rank's hetctl is not rank 0's, or its torch not that of its island's first rank.

    A native library speaks with its own version alone, and gloo's messages are no published format either; what crosses
    islands is hetctl's own, whatever torch and Python are on either side.
    """
    told, first = PrefixStore("builds/", store), placement.island_of_rank[rank].ranks[0]
    if rank in (0, first):
        told.set(str(rank), json.dumps([code_digest(), torch.__version__]))
    ours, theirs = code_digest(), json.loads(told.get("0"))[0]
    if ours != theirs:
        raise ConfigError(
            f"{_who(rank, placement)} runs another hetctl ({ours}) than {_who(0, placement)} ({theirs})",
            hint="install the same version on all hosts",
        )
    version = json.loads(told.get(str(first)))[1]
    if release(version) != release(torch.__version__):
        raise ConfigError(
            f"{_who(rank, placement)} has torch {torch.__version__} where {_who(first, placement)} of its island has "
            f"{version}: one native group needs one version",
            hint="`hetctl doctor --only sw.match` names the hosts; islands may differ, hosts of one may not",
        )


@cache
def code_digest() -> str:
    """Of the sources of `comm`: what ranks write to each other is as it says."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _who(rank: int, placement: Placement) -> str:
    return f"rank {rank}" + (f" on {placement.hosts[rank]}" if rank < len(placement.hosts) else "")


def release(version: str) -> list[str]:
    """Major and minor: builds of one release work together, as of one torch for several versions of a driver."""
    return version.split(".")[:2]
