"""The transfers of one lane: begun in turn over the ports that both ends share, ended in order.

A port whose transfer fails is used no more, and said to be lost; its transfers begin again over those that are left.
Nobody else has to agree: a slot belongs to the end that moves it until that end tells of it. Only what an engine calls
failed moves; what is merely late could still be written after its slot has other bytes, so it ends the lane when it is
very late. The last port's failure is the lane's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetctl.comm.bridge.engines.base import EngineFailed, EnginePort, Region
from hetctl.comm.contract.errors import reason_of

POLL_SECONDS = 50e-6  # between questions about a transfer that is under way
STALL_SECONDS = 120.0  # a slot, alone in front, that takes longer is not coming: ports were seen to repeat for ever

Lose = Callable[[str, str], None]  # port, why


@dataclass(frozen=True)
class ConnectedPort:
    """One port of this end, connected to one of the other end."""

    name: str
    rail: EnginePort
    region: Region
    peer: Any


@dataclass
class _LaneTransfer:
    offset: int
    nbytes: int
    port: ConnectedPort
    handle: Any


def described(rails: Sequence[EnginePort], regions: Sequence[Region]) -> list[dict[str, Any]]:
    """What the other end has to know of this one's ports."""
    return [
        {"network": rail.network, "descriptor": dict(region.descriptor)}
        for rail, region in zip(rails, regions, strict=True)
    ]


def connect(
    rails: Sequence[EnginePort], regions: Sequence[Region], theirs: Sequence[Mapping[str, Any]], lose: Lose
) -> list[ConnectedPort]:
    """The ports to the other end, by what it said of its ports. Raises EngineFailed when none can be."""
    found: list[ConnectedPort] = []
    together = pairs([rail.network for rail in rails], [str(one["network"]) for one in theirs])
    why = "the other end has no port in its network"
    for number in sorted(set(range(len(rails))) - {mine for mine, _ in together}):
        lose(rails[number].port, why)
    for mine, other in together:
        rail = rails[mine]
        try:
            peer = rail.engine.connect(theirs[other]["descriptor"])
        except EngineFailed as error:
            why = reason_of(error)
            lose(rail.port, why)
            continue
        found.append(ConnectedPort(rail.port, rail, regions[mine], peer))
    if not found:
        raise EngineFailed(f"no port reaches the other end: {why}")
    return found


class LaneTransfers:
    """The transfers of one end of a lane; all slots keep their offset at both ends."""

    def __init__(self, ports: list[ConnectedPort], address: int, lose: Lose, *, write: bool) -> None:
        self._left, self._address, self._lose, self._write = list(ports), address, lose, write
        self._under_way: deque[_LaneTransfer] = deque()  # oldest first
        self._begun = 0
        self._failed = ""
        self._since: tuple[_LaneTransfer | None, float] = None, 0.0  # the oldest, and since when

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def port(self) -> str:
        """The port that the oldest transfer, or the one that failed last, takes; '' where nothing is known of any."""
        return self._failed or (self._under_way[0].port.name if self._under_way else "")

    def begin(self, offset: int, nbytes: int) -> None:
        """Raises EngineFailed."""
        self._under_way.append(self._start(offset, nbytes))

    def ended(self) -> int:
        """How many of the oldest transfers are over. Raises EngineFailed."""
        count = 0
        while self._under_way and self._over(self._under_way[0]):
            transfer = self._under_way.popleft()
            transfer.port.rail.engine.drop(transfer.handle)
            count += 1
        if self._under_way:
            self._check_stall(self._under_way[0])
        return count

    def _check_stall(self, oldest: _LaneTransfer) -> None:
        now = time.monotonic()
        if self._since[0] is not oldest:
            self._since = (oldest, now)
        elif now - self._since[1] > STALL_SECONDS:
            raise EngineFailed(f"a transfer did not end within {STALL_SECONDS:g} s")

    def introduce(self, nbytes: int, end: float, check: Callable[[], object] = lambda: None) -> None:
        """Make the first contact over every port, one after the other, with slots that nothing is in yet.

        `check` raises RuntimeError where that is wanted no more.
        """
        for port in list(self._left):
            try:
                handle = self._call(port, 0, nbytes, write=True)
                while not port.rail.engine.poll(handle):
                    if time.monotonic() > end:
                        self._failed = port.name
                        raise RuntimeError("timed out")
                    check()
                    time.sleep(POLL_SECONDS)
                port.rail.engine.drop(handle)
            except EngineFailed as error:
                self._without(port, error)

    def serve(self) -> bool:
        """Do what the other end's transfers need of this one; whether that has to be done again and again."""
        again = [port.rail.engine.serve() for port in self._left]  # all of them
        return any(again)

    def drop(self) -> None:
        """Forget what is under way."""
        for transfer in self._under_way:
            transfer.port.rail.engine.drop(transfer.handle)
        self._under_way.clear()

    def _start(self, offset: int, nbytes: int) -> _LaneTransfer:
        while True:
            port = self._left[self._begun % len(self._left)]
            self._begun += 1
            try:
                return _LaneTransfer(offset, nbytes, port, self._call(port, offset, nbytes, write=self._write))
            except EngineFailed as error:
                self._without(port, error)

    def _call(self, port: ConnectedPort, offset: int, nbytes: int, *, write: bool) -> Any:
        there = self._address + offset
        return port.rail.engine.post(port.peer, port.region, offset, there=there, nbytes=nbytes, write=write)

    def _over(self, transfer: _LaneTransfer) -> bool:
        try:
            return transfer.port.rail.engine.poll(transfer.handle)
        except EngineFailed as error:
            transfer.port.rail.engine.drop(transfer.handle)
            self._without(transfer.port, error)
        again = self._start(transfer.offset, transfer.nbytes)
        transfer.port, transfer.handle = again.port, again.handle
        return False

    def _without(self, port: ConnectedPort, error: EngineFailed) -> None:
        """Use a port no more. Raises EngineFailed when it is the last."""
        if port not in self._left:
            return
        if len(self._left) == 1:
            self._failed = port.name
            raise error
        self._left.remove(port)
        self._lose(port.name, reason_of(error))


def pairs(mine: Sequence[str], theirs: Sequence[str]) -> list[tuple[int, int]]:
    """Numbers of ports that go together, from the network of each port; every port in a shared network is in one.

    Where a network has more ports at one end, those of the other end serve several. Where either end does not name
    its networks, all ports count as in one. The other end gets the same pairs, turned round, in the same order.
    """
    if "" in mine or "" in theirs:
        mine, theirs = [""] * len(mine), [""] * len(theirs)
    found = []
    for network in sorted(set(mine) & set(theirs)):
        here = [i for i, name in enumerate(mine) if name == network]
        there = [i for i, name in enumerate(theirs) if name == network]
        found += [(here[k % len(here)], there[k % len(there)]) for k in range(max(len(here), len(there)))]
    return found
