"""The two threads that run one group's collectives in the order the program issued them.

The first begins them; the second ends those that come in parts, so that the next collective is reduced and sent while
what other islands hold of this one is still on its way. On every communicator and every lane the order is the
program's, whatever the threads' timing (second halves have a communicator of their own), so all ranks agree unasked.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from hetctl.comm.bridge.staging import side_stream
from hetctl.comm.operation.device import has_streams, module_of
from hetctl.comm.operation.intervals import meet
from hetctl.comm.operation.task_queue import TaskQueue
from hetctl.comm.operation.views import may_write
from hetctl.comm.operation.work import HetWork, NativeFailed, OperationDeadline, ended_by, reason_of

Extents = list[tuple[int, int]]  # addresses, from the first byte to behind the last
OVERDUE_SECONDS = 2.0  # after its deadline: transports say more of what they wait for
PARTS_AHEAD = 8  # handed over and not yet ended: bounds the memory of what is on its way
Step = Callable[[], None]
Part = tuple[Step | None, Step]  # what its second half begins with, and ends with: others' beginnings may come between
Call = Callable[[], Iterable[Part] | None]


@dataclass(frozen=True, eq=False)
class PendingItem:
    """What ended for the host, while its kernels run or wait for a rank that is gone.

    `event` is behind them; `extents` is the memory that later ones have to mind.
    """

    what: str
    deadline: OperationDeadline | None
    event: Any
    device: torch.device
    extents: Extents | None = None

    def over(self) -> bool:
        """Ask the device; of a thread that never chose one, a question would make a context on the first."""
        with module_of(self.device).device(self.device) if has_streams(self.device) else contextlib.nullcontext():
            return bool(self.event.query())


class PendingDeviceWork:
    """What the devices of a group still owe; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: deque[PendingItem] = deque()  # they end in about this order

    def add(self, item: PendingItem) -> None:
        """Remember one, and forget those that are over."""
        with self._lock:
            self._forget()
            self._open.append(item)

    def on(self, extents: Extents) -> list[Any]:
        """The events behind which this memory may be touched again."""
        with self._lock:
            self._forget()
            return [item.event for item in self._open if item.extents is not None and meet(item.extents, extents)]

    def _forget(self) -> None:
        """Those that are over, up to the first that is not: however far ahead the host is, few are asked about."""
        while self._open and self._open[0].over():
            self._open.popleft()

    def overdue(self) -> str | None:
        """A sentence on one that should have been over by its deadline and is not, if there is any.

        No device is asked before that: a question disturbs a graph that the program may be capturing.
        """
        with self._lock:
            late = [(d, d.deadline) for d in self._open if d.deadline is not None and d.deadline.passed()]
        for item, deadline in late:
            try:
                if not item.over():
                    return f"{item.what} has not ended on its device: {deadline.verdict}"
            except RuntimeError as error:
                if "captur" in str(error):  # a graph is being made: asked again later
                    continue
                return f"{item.what} failed on its device: {reason_of(error)}"
            with self._lock:
                if item in self._open:
                    self._open.remove(item)
        return None


@dataclass(eq=False)
class QueuedCollective:
    """One collective: its call begins it, and yields parts where others may begin before it has ended."""

    work: HetWork
    call: Call
    touched: Sequence[torch.Tensor]
    parted: bool
    start: Any = None  # the event on the program's stream behind which its tensors may be touched
    broken: bool = False  # inside its island: it ends with the verdict

    @property
    def device(self) -> torch.device:
        return self.touched[0].device if self.touched else torch.device("cpu")

    @cached_property
    def extents(self) -> Extents:
        """The memory it touches: every job behind it asks, so it is worked out once."""
        return [extent(tensor) for tensor in self.touched]

    def meets(self, other: QueuedCollective) -> bool:
        """Whether the two touch common memory."""
        return meet(self.extents, other.extents)


class Runner:
    """One ordered queue of collectives and the two threads that run them."""

    def __init__(self, name: str, *, on_error: Callable[[str], None]) -> None:
        self._first = TaskQueue(name, self._begin)
        self._second = TaskQueue(f"{name}, second halves", self._continue)
        self._state = threading.Condition()
        self._turn = threading.Lock()  # one collective begins at a time, whosever thread it is in
        self._open: dict[int, QueuedCollective] = {}
        self._parts = 0  # handed over and not yet ended
        self.pending_device_work = PendingDeviceWork()
        # the second thread's: parts whose end is still to do
        self._begun: deque[tuple[QueuedCollective, Step, Any]] = deque()
        self._error: BaseException | None = None
        self._on_error = on_error
        self._streams: dict[tuple[torch.device, bool], Any] = {}
        self._warm: set[tuple[torch.dtype, int]] = set()

    def put(
        self,
        work: HetWork,
        call: Call,
        *,
        touched: Sequence[torch.Tensor],
        waited: bool = False,
        parted: bool = False,
    ) -> None:
        """Run `call` after everything put before it, then finish `work`; on side streams if the device has any."""
        job = QueuedCollective(work, call, touched, parted)
        if has_streams(job.device):
            job.start = module_of(job.device).current_stream(job.device).record_event()
        with self._state:
            if (error := ended_by(work.what, self._error)) is not None:
                raise error
            # a caller who waits anyway runs it in its own thread where nothing is before it: two switches less
            inline = waited and not parted and not self._open and self._turn.acquire(blocking=False)
            self._open[id(job)] = job
            if not inline:
                self._first.put(job)
        if inline:
            try:
                self._run(job, lambda: self._start(job))
            finally:
                self._turn.release()

    def _begin(self, job: QueuedCollective) -> None:
        with self._turn:
            self._run(job, lambda: self._start(job))

    def _start(self, job: QueuedCollective) -> None:
        with self._stream(job, second=False) as stream:
            parted = job.parted and self._is_warm(job)
            waits = not parted or self._meets_open(job)  # what ends in this thread must not overtake the other one's
            if waits:
                self._await_parts(0)
            if stream is not None:
                stream.wait_event(job.start)
                if waits:
                    stream.wait_stream(self._side(job.device, second=True))
                for event in self.pending_device_work.on(job.extents):
                    stream.wait_event(event)
            if parted:
                for part in job.call() or ():
                    self._hand_over(job, part, stream)
                self._hand_over(job, (None, lambda: self._finish(job)), stream)
                return
            at_once(job.call() or ())
            if job.parted and stream is not None:
                stream.synchronize()
            self._finish(job)

    def _is_warm(self, job: QueuedCollective) -> bool:
        """False for the first of its size and type on a device, which then runs alone.

        A kernel's first launch may load a module, which can wait for all that runs there: also for a communicator's
        kernel whose peer waits in the same way for the other communicator's.
        """
        if not has_streams(job.device):
            return True
        kinds = {(t.dtype, (t.numel() * t.element_size()).bit_length()) for t in job.touched}
        warm = kinds <= self._warm
        self._warm |= kinds
        return warm

    def _meets_open(self, job: QueuedCollective) -> bool:
        """Whether it touches memory of one before it that has not ended."""
        with self._state:
            before = list(itertools.takewhile(lambda other: other is not job, self._open.values()))
        return any(job.meets(other) for other in before if other.parted)

    def _await_parts(self, most: int) -> None:
        """Wait until at most so many parts are on their way."""
        with self._state:
            self._state.wait_for(lambda: self._parts <= most or self._error is not None)
            if self._error is not None:
                raise self._error

    def _hand_over(self, job: QueuedCollective, part: Part, stream: Any) -> None:
        self._await_parts(PARTS_AHEAD - 1)
        with self._state:
            self._parts += 1
        self._second.put((job, part, None if stream is None else stream.record_event()))

    def _continue(self, handed: tuple[QueuedCollective, Part, Any]) -> None:
        """Begin a part's second half; end the one before it, and this one too where no other has come."""
        job, (begin, end), ready = handed
        self._half(job, begin, ready)
        self._begun.append((job, end, ready))
        while self._begun and (len(self._begun) > 1 or self._second.empty()):
            self._half(*self._begun.popleft())
            with self._state:
                self._parts -= 1
                self._state.notify_all()

    def _half(self, job: QueuedCollective, step: Step | None, ready: Any) -> None:
        if step is None or job.broken or id(job) not in self._open:
            return
        with self._stream(job, second=True) as stream:
            if stream is not None:
                stream.wait_event(ready)
            self._run(job, step)

    def _run(self, job: QueuedCollective, call: Step) -> None:
        """The threads' boundary: what goes wrong becomes the job's outcome, or the group's."""
        try:
            if self._error is not None:
                raise self._error
            with may_write(job.touched):
                call()
        except NativeFailed as failed:
            job.broken = True
            if self._error is None:
                self._on_error(str(failed))
                return
            self._finish(job, error=self._error)
        except Exception as wrong:
            self._finish(job, error=wrong)

    def _finish(self, job: QueuedCollective, *, error: BaseException | None = None) -> None:
        ready = None
        if error is None and has_streams(job.device):
            ready = module_of(job.device).current_stream(job.device).record_event()
        if ready is not None:  # before it is no longer open: whoever touches its memory next finds one or the other
            minded = job.extents if job.parted else None
            self.pending_device_work.add(PendingItem(job.work.what, job.work.deadline, ready, job.device, minded))
        with self._state:
            self._open.pop(id(job), None)
        job.work.finish(ready=ready, error=error)

    @contextlib.contextmanager
    def _stream(self, job: QueuedCollective, *, second: bool) -> Iterator[Any]:
        """The side stream of a half, current; None where devices have none."""
        if not has_streams(job.device):
            yield None
            return
        streams = module_of(job.device)
        streams.set_device(job.device)
        stream = self._side(job.device, second=second)
        with streams.stream(stream):
            for tensor in job.touched:
                tensor.record_stream(stream)
            yield stream

    def _side(self, device: torch.device, *, second: bool) -> Any:
        if (device, second) not in self._streams:
            self._streams[device, second] = side_stream(device)
        return self._streams[device, second]

    def is_here(self) -> bool:
        """Whether the calling thread is one of the two: what it waits for there would never begin."""
        return self._first.is_here() or self._second.is_here()

    def busy(self) -> bool:
        """Whether a collective has not ended."""
        with self._state:
            return bool(self._open)

    def overdue(self) -> str | None:
        """A sentence on what is late here, said by no transport: on a device, or a collective that has not ended."""
        if (owed := self.pending_device_work.overdue()) is not None:
            return owed
        with self._state:
            works = [job.work for job in self._open.values()]
        late = [(w, w.deadline) for w in works if w.deadline is not None and w.deadline.passed(since=OVERDUE_SECONDS)]
        return f"{late[0][0].what} has not ended: {late[0][1].verdict}" if late else None

    def fail(self, error: BaseException) -> None:
        """End everything queued or running with `error`; nothing more is accepted."""
        with self._state:
            self._error = self._error or error
            pending, self._open = list(self._open.values()), {}
            self._state.notify_all()
        for job in pending:
            job.work.finish(error=self._error)

    def rest(self, *, seconds: float) -> None:
        """Wait until the threads hold nothing any more."""
        self._first.rest(seconds=seconds)
        self._second.rest(seconds=seconds)

    def close(self, *, seconds: float) -> None:
        """Run what is queued and end the threads."""
        self._first.close(seconds=seconds)
        self._second.close(seconds=seconds)


def at_once(parts: Iterable[Part]) -> None:
    """Run a collective to its end in this thread."""
    for begin, end in parts:
        if begin is not None:
            begin()
        end()


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to behind its last."""
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()
