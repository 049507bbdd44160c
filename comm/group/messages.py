"""Messages inside an island, with this back end's deadlines, names and error flag; receives from whoever sends first.

For those one receive is posted to every peer, and what was posted too much is kept. A kept receive serves the next one
from that peer with its tag, so messages of a tag that is received from any source must be of one size.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from hetctl.comm.group.runner import PendingDeviceWork, PendingItem
from hetctl.comm.operation.device import captures_graph, module_of
from hetctl.comm.operation.views import may_write, memory_of
from hetctl.comm.operation.work import BridgeError, HetWork, OperationDeadline, reason_of


class NativeMessage(HetWork):
    """A native send or receive: waited for in the caller's thread, where an error rings the group's alarm."""

    def __init__(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        *,
        native: Any,
        deadline: OperationDeadline,
        on_error: Callable[[str], BridgeError],
        landing: torch.Tensor | None = None,
        pending_device_work: PendingDeviceWork | None = None,
    ) -> None:
        super().__init__(what, tensors, deadline=deadline)
        self._native, self._until, self._on_error = native, deadline, on_error
        self._on_host = tensors[0].is_cpu
        self._claimed = False
        self.on_wait: Callable[[], object] = lambda: None  # told when the program begins to wait
        self._landing = landing  # what native libraries wrote, where they cannot write the program's own tensor
        self._pending_device_work = pending_device_work

    def end(self) -> None:
        """Wait, keeping the outcome: for a thread of its own."""
        with contextlib.suppress(RuntimeError):
            self.wait()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.on_wait()
        if self._claim():
            self._end_native(timeout)
        return super().wait(timeout)

    def _claim(self) -> bool:
        """Whether nobody has waited natively yet: a second wait for one message would never end."""
        with self._lock:
            first, self._claimed = not self._claimed, True
        return first

    def _end_native(self, timeout: timedelta | None = None) -> None:
        """Wait for the native message, and finish with what came of it."""
        try:
            # with a timeout NCCL would block the host; its own watchdog keeps the group's
            gone = self._native.wait(timeout or self._until.delta()) if self._on_host else self._native.wait()
            if gone is not False:
                self._copy_landing()
                self._track_device_work()
            self.finish(error=BridgeError(f"{self.what} was aborted") if gone is False else None)
        except RuntimeError as error:
            late = self._until.verdict if self._until.passed() else reason_of(error)
            self.finish(error=self._on_error(f"{self.what} failed: {late}"))

    def _copy_landing(self) -> None:
        """Give the program's tensor what arrived, behind the current stream on devices."""
        if self._landing is not None:
            with may_write(self._outputs):
                memory_of(self._outputs[0]).copy_(self._landing)

    def _track_device_work(self) -> None:
        """On devices the current stream is behind the message now, which may hang there: somebody has to notice."""
        device = self._outputs[0].device
        if self._pending_device_work is not None and not self._on_host and not captures_graph(device):
            event = module_of(device).current_stream(device).record_event()
            self._pending_device_work.add(PendingItem(self.what, self._until, event, device))

    def is_completed(self) -> bool:
        if not self._done.is_set():
            if self._on_host:
                self._wait_behind()
            elif self._native.is_completed():
                self.end()
        return self._done.is_set()

    def _wait_behind(self) -> None:
        """Wait in a thread of its own: gloo tells nobody else that a message has ended."""
        self.on_wait()
        if self._claim():
            threading.Thread(target=self._end_native, name="het message", daemon=True).start()

    def get_future(self) -> torch.futures.Future[Any]:
        if self._on_host:  # gloo's messages have none
            self._wait_behind()
            return super().get_future()
        future: torch.futures.Future[Any] = self._native.get_future()
        return future if self._landing is None else future.then(lambda _: self._copy_landing())


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
