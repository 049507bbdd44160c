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
class PortTransfers:
    """One port of this end, connected to one of the other end."""

    port: str
    rail: EnginePort
    region: Region
    peer: Any


@dataclass
class _Move:
    offset: int
    nbytes: int
    transfers: PortTransfers
    handle: Any


def described(rails: Sequence[EnginePort], regions: Sequence[Region]) -> list[dict[str, Any]]:
    """What the other end has to know of this one's ports."""
    return [
        {"network": rail.network, "descriptor": dict(region.descriptor)}
        for rail, region in zip(rails, regions, strict=True)
    ]


def connect(
    rails: Sequence[EnginePort], regions: Sequence[Region], theirs: Sequence[Mapping[str, Any]], lose: Lose
) -> list[PortTransfers]:
    """The ports to the other end, by what it said of its ports. Raises EngineFailed when none can be."""
    found: list[PortTransfers] = []
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
        found.append(PortTransfers(rail.port, rail, regions[mine], peer))
    if not found:
        raise EngineFailed(f"no port reaches the other end: {why}")
    return found


class LaneTransfers:
    """The transfers of one end of a lane; all slots keep their offset at both ends."""

    def __init__(self, lane_transfers: list[PortTransfers], address: int, lose: Lose, *, write: bool) -> None:
        self._left, self._address, self._lose, self._write = list(lane_transfers), address, lose, write
        self._moves: deque[_Move] = deque()  # oldest first
        self._begun = 0
        self._failed = ""
        self._since: tuple[_Move | None, float] = (None, 0.0)  # the oldest transfer, and from when on it was that

    def __len__(self) -> int:
        return len(self._moves)

    @property
    def port(self) -> str:
        """The port that the oldest transfer, or the one that failed last, takes; '' where nothing is known of any."""
        return self._failed or (self._moves[0].transfers.port if self._moves else "")

    def begin(self, offset: int, nbytes: int) -> None:
        """Raises EngineFailed."""
        self._moves.append(self._start(offset, nbytes))

    def ended(self) -> int:
        """How many of the oldest transfers are over. Raises EngineFailed."""
        count = 0
        while self._moves and self._over(self._moves[0]):
            move = self._moves.popleft()
            move.transfers.rail.engine.drop([move.handle])
            count += 1
        if self._moves:
            self._check_stall(self._moves[0])
        return count

    def _check_stall(self, oldest: _Move) -> None:
        now = time.monotonic()
        if self._since[0] is not oldest:
            self._since = (oldest, now)
        elif now - self._since[1] > STALL_SECONDS:
            raise EngineFailed(f"a transfer did not end within {STALL_SECONDS:g} s")

    def introduce(self, nbytes: int, end: float, check: Callable[[], object] = lambda: None) -> None:
        """Make the first contact over every port, one after the other, with slots that nothing is in yet.

        `check` raises RuntimeError where that is wanted no more.
        """
        for transfers in list(self._left):
            try:
                handle = self._call(transfers, 0, nbytes, write=True)
                while not transfers.rail.engine.poll(handle):
                    if time.monotonic() > end:
                        self._failed = transfers.port
                        raise RuntimeError("timed out")
                    check()
                    time.sleep(POLL_SECONDS)
                transfers.rail.engine.drop([handle])
            except EngineFailed as error:
                self._without(transfers, error)

    def serve(self) -> bool:
        """Do what the other end's transfers need of this one; whether that has to be done again and again."""
        again = [transfers.rail.engine.serve() for transfers in self._left]  # all of them
        return any(again)

    def drop(self) -> None:
        """Forget what is under way."""
        for move in self._moves:
            move.transfers.rail.engine.drop([move.handle])
        self._moves.clear()

    def _start(self, offset: int, nbytes: int) -> _Move:
        while True:
            transfers = self._left[self._begun % len(self._left)]
            self._begun += 1
            try:
                return _Move(offset, nbytes, transfers, self._call(transfers, offset, nbytes, write=self._write))
            except EngineFailed as error:
                self._without(transfers, error)

    def _call(self, transfers: PortTransfers, offset: int, nbytes: int, *, write: bool) -> Any:
        engine, there = transfers.rail.engine, self._address + offset
        if write:
            return engine.post_write(transfers.peer, transfers.region, offset, to=there, nbytes=nbytes)
        return engine.post_read(transfers.peer, transfers.region, offset, origin=there, nbytes=nbytes)

    def _over(self, move: _Move) -> bool:
        try:
            return move.transfers.rail.engine.poll(move.handle)
        except EngineFailed as error:
            move.transfers.rail.engine.drop([move.handle])
            self._without(move.transfers, error)
        again = self._start(move.offset, move.nbytes)
        move.transfers, move.handle = again.transfers, again.handle
        return False

    def _without(self, transfers: PortTransfers, error: EngineFailed) -> None:
        """Use a port no more. Raises EngineFailed when it is the last."""
        if transfers not in self._left:
            return
        if len(self._left) == 1:
            self._failed = transfers.port
            raise error
        self._left.remove(transfers)
        self._lose(transfers.port, reason_of(error))


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
