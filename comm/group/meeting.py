"""Islands where nobody told any: the ranks of a job say what they compute on when they first meet."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from hetctl.comm.bridge.connecting import address_of
from hetctl.comm.contract import variables
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.natives import HOST, native_of, vendor_of
from hetctl.comm.contract.placement import PlacedBridge, PlacedIsland, Placement, current_placement, remember
from hetctl.comm.contract.started import address_towards
from hetctl.comm.contract.transports import FALLBACK, TransportKind
from hetctl.comm.contract.units import listed, span_of
from hetctl.comm.contract.values import decode, encode
from hetctl.comm.group.builds import release
from hetctl.comm.operation.device import accelerator
from hetctl.comm.operation.work import PrefixStore, Store

LOOPBACK = "127.0.0.1"
_PORTS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class RankFacts:
    """What a rank says of itself."""

    host: str
    boot: str  # of the machine: hosts may have one name
    address: str  # where peers reach it
    vendor: str
    torch_backend: str
    fabric: str  # its RDMA ports' link layer, '' without any
    release: str  # of torch
    island: str = ""  # as a person named it


def placement_for(options: Any) -> Placement:
    """What the launcher told of islands; where it told nothing, what the job's ranks found when they met: now, if
    `options` are of the group of all of them. Raises ConfigError where they cannot meet."""
    first = not options.global_ranks_in_group
    if first and not os.environ.get(variables.PLACEMENT):
        remember(meet(options.store, options.group_rank, options.group_size))
    return current_placement()


def meet(store: Store, rank: int, size: int) -> Placement:
    """All ranks of the job: the islands that rank 0 makes of what they say, and says aloud. Raises ConfigError."""
    told, mine = PrefixStore("found/", store), json.dumps(encode(facts_here(store)))
    told.set(str(rank), mine)
    if rank == 0:
        every = [decode(RankFacts, json.loads(told.get(str(r))), where=f"rank {r}") for r in range(size)]
        try:
            found = islands_of(every)
        except ConfigError as error:
            told.set("islands", json.dumps({"problem": error.message, "hint": error.hint}))
            raise
        told.set("islands", found.to_json())
        print(sentence(found), file=sys.stderr, flush=True)
    said = json.loads(told.get("islands"))
    if "problem" in said:
        raise ConfigError(said["problem"], hint=said["hint"])
    if told.get(str(rank)) != mine.encode():
        raise ConfigError(f"two processes say that they are rank {rank}", hint="each needs a RANK of its own")
    return decode(Placement, said, where="islands")


def facts_here(store: Store) -> RankFacts:
    """This process's; the interface that reaches the job's store becomes gloo's, unless one was named."""
    device_type = os.environ.get(variables.DEVICE_TYPE) or accelerator() or HOST
    address = _reached_at(store)
    return RankFacts(
        socket.gethostname(),
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        address,
        vendor_of(device_type, hip=torch.version.hip is not None),
        native_of(device_type=device_type).torch_backend,
        link_layer(),
        ".".join(release(torch.__version__)),
        os.environ.get(variables.ISLAND, ""),
    )


def islands_of(ranks: Sequence[RankFacts]) -> Placement:
    """An island of those that one library joins: of a vendor, a kind of fabric and a release of torch, or of the name
    that a person gave them. Bridges go through memory inside one machine, over TCP between machines.

    Raises ConfigError where ranks of one island have unlike libraries, or hosts do not reach each other.
    """
    if len({r.boot for r in ranks}) > 1 and (lonely := [r.host for r in ranks if r.address.startswith("127.")]):
        raise ConfigError(
            f"{lonely[0]} has only a loopback address towards MASTER_ADDR, and other hosts take part",
            hint="export MASTER_ADDR as the address of rank 0's host, or GLOO_SOCKET_IFNAME as its interface",
        )
    members: dict[tuple[str, ...], list[int]] = {}
    for number, rank in enumerate(ranks):
        members.setdefault((rank.island,) if rank.island else (rank.vendor, rank.fabric, rank.release), []).append(
            number
        )
    islands: list[PlacedIsland] = []
    for key, mine in members.items():
        kinds = sorted({ranks[r].torch_backend for r in mine})
        if len(kinds) > 1:
            raise ConfigError(f"island {key[0]} has ranks of {listed(kinds)}: one library cannot join them")
        name = "-".join(filter(None, key)) if any(i.name == key[0] for i in islands) else key[0]
        islands.append(PlacedIsland(name, ranks[mine[0]].vendor, kinds[0], tuple(mine)))
    one_machine = len({r.boot for r in ranks}) == 1
    kind: TransportKind = "shm" if one_machine else FALLBACK
    bridges = (PlacedBridge((a.name, b.name), kind, False) for a, b in combinations(islands, 2))
    return Placement(tuple(islands), tuple(bridges), tuple(r.host for r in ranks))


def sentence(found: Placement) -> str:
    """For people."""
    names = [f"{i.name} ({i.torch_backend}, ranks {', '.join(_spans(i.ranks))})" for i in found.islands]
    kinds = sorted({b.transport for b in found.bridges})
    return f"hetctl: islands {listed(names)}" + (f", bridged over {listed(kinds)}" if kinds else ": nothing to bridge")


def _spans(ranks: Sequence[int]) -> list[str]:
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return [span_of(*span) for span in found]


def link_layer(ports: Path = _PORTS) -> str:
    """`InfiniBand` where a host has an active port of it, otherwise `Ethernet` for RoCE, '' without RDMA."""
    kinds = set()
    for port in ports.glob("*/ports/*"):
        try:
            if "ACTIVE" in (port / "state").read_text():
                kinds.add((port / "link_layer").read_text().strip())
        except OSError:
            continue
    return "InfiniBand" if "InfiniBand" in kinds else next(iter(sorted(kinds)), "")


def _reached_at(store: Store) -> str:
    """This host's address towards the store. Raises ConfigError where there is no way."""
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return address_of(named.split(",")[0])
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    there = os.environ.get("MASTER_ADDR") or getattr(store, "host", "") or LOOPBACK
    mine = address_towards(there)
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):  # it has no address
            if address_of(name) == mine:
                os.environ["GLOO_SOCKET_IFNAME"] = name
    return mine
