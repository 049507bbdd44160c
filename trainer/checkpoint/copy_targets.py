"""Which ranks keep copies of which other ranks' checkpoint shards. No torch: the launcher's side asks too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

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


class Console(Protocol):
    """Where people look."""

    def say(self, content: str) -> None: ...
    def warn(self, sentence: str) -> None: ...


def say_where_shards_live(
    store: str, hosts: Sequence[str], folder: Path, *, spread: bool, over: bool, console: Console
) -> None:
    """What `checkpoint.store` comes to for ranks on these hosts. Raises ConfigError where it cannot be.

    `spread`: the hosts do not share the run's folder; `over`: replicas share out their state.
    """
    if spread and store == "shared":
        raise ConfigError(
            f"checkpoint.store=shared: the hosts do not share {folder}",
            hint="give a folder that they share with --run-dir, or leave checkpoint.store=auto",
        )
    if spread and store == "auto":
        console.warn(
            f"the hosts do not share {folder}: each keeps its shards of a checkpoint in its own run folder "
            "(checkpoint.store=replicate:2 keeps them on another one too)"
            + (", and replicas share out their state: without any one host no checkpoint is whole" if over else "")
        )
    elif store not in ("auto", "shared"):
        alone = len(set(hosts)) == 1
        if not any(targets_of(hosts, store)) or not spread:
            console.warn(
                f"checkpoint.store={store} copies nothing: " + ("there is one host" if alone else "it is shared")
            )
        else:
            console.say(f"the hosts do not share {folder}: checkpoint.store={store} copies shards between them")
