"""Messages between ranks of one island: native ones, with this back end's deadlines, names and error flag."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from hetctl.comm.group.pending_work import PendingDeviceWork, PendingItem
from hetctl.comm.operation.device import captures_graph, module_of
from hetctl.comm.operation.views import may_write
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
                self._outputs[0].detach().copy_(self._landing)

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
