"""Receives from whoever sends first: one receive is posted to every peer, and what was posted too much is kept.

A kept receive serves the next one from that peer with its tag, so messages of a tag that is received from any source
must be of one size.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from hetctl.comm.operation.views import may_write
from hetctl.comm.operation.work import BridgeError, HetWork, OperationDeadline

Post = Callable[[torch.Tensor, int, int], HetWork]  # (buffer, peer, tag): a receive without a deadline of its own


class PendingReceive(HetWork):
    """A receive that one without a deadline serves: whoever waits for it sees to its own, and rings the alarm."""

    def __init__(
        self,
        what: str,
        tensors: list[torch.Tensor],
        *,
        deadline: OperationDeadline,
        on_error: Callable[[str], BridgeError],
    ) -> None:
        super().__init__(what, tensors, deadline=deadline)
        self._until, self._on_error = deadline, on_error

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not timeout and not self._done.wait(self._until.left()):
            self.finish(error=self._on_error(f"{self.what} failed: {self._until.verdict}"))
        return super().wait(timeout)


@dataclass
class _Tag:
    wants: deque[tuple[torch.Tensor, HetWork]] = field(default_factory=deque)
    named: dict[int, deque[tuple[torch.Tensor, HetWork]]] = field(default_factory=dict)
    arrived: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)
    posted: dict[int, int] = field(default_factory=dict)  # peer -> receives under way
    like: torch.Tensor | None = None  # what they are posted for


def _check_alike(kept: torch.Tensor, target: torch.Tensor, tag: int) -> None:
    """Raises ValueError where what a kept receive takes does not fit this one."""
    if kept.nbytes != target.nbytes:
        raise ValueError(
            f"messages of tag {tag} were received from any source with {kept.nbytes} bytes, and such a receive is "
            f"still posted: one of {target.nbytes} bytes needs a tag of its own"
        )


class AnySource:
    """The any-source receives of one group."""

    def __init__(self, post: Post, peers: tuple[int, ...]) -> None:
        self._post, self._peers = post, peers
        self._lock = threading.RLock()
        self._tags: dict[int, _Tag] = {}

    def knows(self, tag: int) -> bool:
        """Whether messages of this tag were ever received from any source."""
        return tag in self._tags

    def under_way(self) -> bool:
        """Whether receives are posted that nobody may ever send to."""
        return any(count for tag in self._tags.values() for count in tag.posted.values())

    def recv(self, target: torch.Tensor, tag: int, work: HetWork) -> None:
        """Finish `work`, its source set, when the first message with this tag is in `target`."""
        with self._lock:
            state = self._tags.setdefault(tag, _Tag())
            if state.arrived:
                self._hand_over(*state.arrived.popleft(), target, work)
                return
            state.wants.append((target, work))
            state.like = target
            lacking = [p for p in self._peers if state.posted.get(p, 0) < len(state.wants)]
            for peer in lacking:
                state.posted[peer] = state.posted.get(peer, 0) + 1
        for peer in lacking:
            self._start(target, peer, tag)

    def claims(self, target: torch.Tensor, peer: int, tag: int, work: HetWork) -> bool:
        """Whether a kept receive serves one from this peer by name; then `work` ends with it."""
        with self._lock:
            state = self._tags.get(tag)
            if state is None:
                return False
            for place, (source, data) in enumerate(state.arrived):
                if source == peer:
                    _check_alike(data, target, tag)
                    del state.arrived[place]
                    self._hand_over(source, data, target, work)
                    return True
            named = state.named.setdefault(peer, deque())
            if state.posted.get(peer, 0) <= len(named) + len(state.wants):
                return False
            if state.like is not None:
                _check_alike(state.like, target, tag)
            named.append((target, work))
            return True

    def _start(self, like: torch.Tensor, peer: int, tag: int) -> None:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        posted = self._post(buffer, peer, tag)
        posted.on_end(lambda: self._ended(posted, buffer, peer, tag))

    def _ended(self, posted: HetWork, buffer: torch.Tensor, peer: int, tag: int) -> None:
        with self._lock:
            state = self._tags[tag]
            state.posted[peer] -= 1
            error = posted.exception()
            if error is not None:
                self._give_up(state, error)
                return
            queue = state.named.get(peer) or state.wants
            if queue:
                self._hand_over(peer, buffer, *queue.popleft())
            else:
                state.arrived.append((peer, buffer))

    def _hand_over(self, peer: int, data: torch.Tensor, target: torch.Tensor, work: HetWork) -> None:
        with may_write([target]):
            target.copy_(data)
        work.source = peer
        work.finish()

    def _give_up(self, state: _Tag, error: BaseException) -> None:
        for queue in (state.wants, *state.named.values()):
            while queue:
                queue.popleft()[1].finish(error=error)
