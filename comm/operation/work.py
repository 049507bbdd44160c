"""The handle of one operation in flight: what `async_op=True` returns, with c10d's waiting and error semantics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _record_function_with_args_enter as enter_span
from torch._C._autograd import _record_function_with_args_exit as leave_span
from torch.autograd import _profiler_enabled as profiling

from hetctl.comm.contract.errors import BridgeError as BridgeError
from hetctl.comm.contract.errors import reason_of as reason_of
from hetctl.comm.operation.device import module_of

# the parts of torch.distributed whose type stubs are incomplete, under one roof and typed as what they are: Any
Work: Any = dist.distributed_c10d.Work
Store = Any  # its stub lacks clone()
ProcessGroup: Any = dist.ProcessGroup  # several signatures a name fit no single override
Gloo: Any = dist.ProcessGroupGloo
PrefixStore: Any = dist.distributed_c10d.PrefixStore
Reduce: Any = dist.ReduceOp.RedOpType

GRACE_SECONDS = 8.0
TICK_SECONDS = 0.002  # gloo's waits end up to a millisecond early: it counts whole ones


def ended_by(what: str, error: BaseException | None) -> BaseException | None:
    """What an operation ends with: a group's verdict, which may be on another operation, with its own name."""
    if not isinstance(error, BridgeError) or what in str(error):
        return error
    return BridgeError(f"{what} ended: {error}", hint=error.hint)


class NativeFailed(BridgeError):
    """The native part of an operation failed while it ran."""


class OperationDeadline:
    """A point in time by which an operation must have ended."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that remain, never below a millisecond: gloo reads zero as for ever."""
        return max(self._end - time.monotonic(), 0.001)

    def passed(self, *, since: float = 0.0) -> bool:
        """Whether it is over, for at least so many seconds."""
        return time.monotonic() >= self._end + since - TICK_SECONDS

    def delta(self) -> timedelta:
        return timedelta(seconds=self.left())

    @property
    def verdict(self) -> str:
        """What is said of an operation that has not ended by then, in the words that torch's own back ends use."""
        return f"Timed out after {self.seconds:g} s"


class HetWork(Work):  # type: ignore[misc]
    """One operation: finished or failed by the thread that runs it, waited for by the program.

    On devices with streams `ready` is the event that the operation's results are behind; `wait` orders the
    current stream after it and returns without waiting for the device.
    """

    def __init__(
        self,
        what: str,
        outputs: Sequence[torch.Tensor] = (),
        *,
        deadline: OperationDeadline | None = None,
    ) -> None:
        super().__init__()
        self.what, self.deadline = what, deadline
        self._outputs = list(outputs)
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._then: list[Callable[[], None]] = []
        self.ready: Any = None  # an event where a stream carries the result
        self.source = -1
        self._span: Any = None
        self._span_thread = 0

    def show(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Let a profiler, where one is on, see the operation from now to its end."""
        if profiling():
            self._span = enter_span(f"het:{name}", *tensors)
            self._span_thread = threading.get_ident()

    def _hide(self) -> None:
        """End what a profiler sees, from another thread than began it: that is how it tells asynchronous ones."""
        if threading.get_ident() != self._span_thread:
            leave_span(self._span)
            return
        helper = threading.Thread(target=leave_span, args=(self._span,))
        helper.start()
        helper.join()

    def finish(self, *, ready: Any = None, error: BaseException | None = None) -> None:
        """End the operation, once; later calls are ignored (an abort may race with success)."""
        with self._lock:
            if self._done.is_set():
                return
            self.ready, self._error = ready, ended_by(self.what, error)
            if self._span is not None:
                self._hide()
            self._done.set()
            then, self._then = self._then, []
            future = self._future
        with torch.inference_mode(False):  # what the program chained to this makes tensors of its own
            for call in then:
                call()
            if future is not None:
                self._settle(future)

    def on_end(self, call: Callable[[], None]) -> None:
        """Run `call` when the operation has ended, or now if it has."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(call)
                return
        call()

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = timeout.total_seconds() if timeout else 0.0
        if not seconds and self.deadline is not None:
            seconds = self.deadline.left() + GRACE_SECONDS  # by then the group's alarm has ended it
        if not self._done.wait(seconds or None):
            raise BridgeError(f"{self.what} did not end within {seconds:.1f} s")
        if self._error is not None:
            raise self._error
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.ready is not None:
            device = self._outputs[0].device if self._outputs else self.ready.device
            module_of(device).current_stream(device).wait_event(self.ready)

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        with self._lock:
            if self._future is not None:
                return self._future
            held: list[Any] = list({t.device for t in self._outputs if not t.is_cpu and t.device.index is not None})
            self._future = torch.futures.Future(devices=held or None)
            ended = self._done.is_set()
        if ended:
            self._settle(self._future)
        return self._future

    def _settle(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)
        elif self.ready is None:
            future.set_result(self._outputs)
        else:
            streams = module_of(self._outputs[0].device)
            with streams.stream(streams.Stream(self._outputs[0].device)):
                streams.current_stream().wait_event(self.ready)
                future.set_result(self._outputs)


class CombinedWork(HetWork):
    """Several operations waited for as one, whosever handles they are."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__("coalesced operations", [t for w in works if isinstance(w, HetWork) for t in w.result()])
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        if not self._works:
            self.finish()
            return super().get_future()
        every = torch.futures.collect_all([work.get_future() for work in self._works])

        def results(ended: torch.futures.Future[Any]) -> list[torch.Tensor]:
            for future in ended.value():
                future.value()  # or its error
            return self._outputs

        return every.then(results)
