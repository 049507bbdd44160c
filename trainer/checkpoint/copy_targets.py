"""Which ranks keep copies of which other ranks' checkpoint shards. No torch: the launcher's side asks too."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.comm.contract.errors import ConfigError


def targets_of(hosts: Sequence[str], store: str) -> list[tuple[int, ...]]:
    """For each rank the ranks on other hosts that keep copies of what it writes. Raises ConfigError.

    `replicate:K` keeps every shard on K hosts (or all there are), the next ones in the plan's order; `gather:HOST`
    all of them on HOST too.
    """
    ranks_on: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_on.setdefault(host, []).append(rank)
    keepers = _keepers(list(ranks_on), store)
    return [
        tuple(ranks_on[k][ranks_on[host].index(rank) % len(ranks_on[k])] for k in keepers[host])
        for rank, host in enumerate(hosts)
    ]


def _keepers(names: list[str], store: str) -> dict[str, list[str]]:
    """Host -> the other hosts that keep its shards."""
    kind, _, word = store.partition(":")
    if kind == "gather":
        if word not in names:
            raise ConfigError(f"checkpoint.store={store}: no rank runs on '{word}'", hint=f"hosts: {', '.join(names)}")
        return {name: [word] if name != word else [] for name in names}
    count = min(int(word), len(names))
    return {name: [names[(at + step) % len(names)] for step in range(1, count)] for at, name in enumerate(names)}
