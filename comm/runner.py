"""The thread that runs one group's collectives in the order the program issued them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetctl.comm.work import HetWork, NativeFailed

IDLE_SECONDS = 5.0


class Runner:
    """One ordered queue of collectives; its thread starts with the first and ends when there is nothing to do."""

    def __init__(self, name: str, *, on_error: Callable[[str], None]) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[HetWork, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._turn = threading.Lock()  # one collective runs at a time, whosever thread it is in
        self._open: dict[int, HetWork] = {}
        self._error: BaseException | None = None
        self._on_error = on_error
        self._streams: dict[torch.device, Any] = {}

    def put(
        self, work: HetWork, call: Callable[[], None], *, touched: Sequence[torch.Tensor], waited: bool = False
    ) -> None:
        """Run `call` after everything put before it, then finish `work`; on a side stream if the device has any."""
        device = touched[0].device if touched else torch.device("cpu")
        start = None
        if device.type == "cuda":
            start = torch.cuda.Event()
            start.record(torch.cuda.current_stream(device))
        job = self._on_stream(call, device, start, touched)
        with self._lock:
            if self._error is not None:
                raise self._error
            # a caller who waits anyway runs it in its own thread where nothing is before it: two switches less
            inline = waited and not self._open and self._turn.acquire(blocking=False)
            self._open[id(work)] = work
            if not inline:
                self._queue.put((work, job))
        if inline:
            try:
                self._do(work, job)
            finally:
                self._turn.release()
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def _on_stream(
        self, call: Callable[[], None], device: torch.device, start: Any, touched: Sequence[torch.Tensor]
    ) -> Callable[[], Any]:
        def run() -> Any:
            with self._stream(device) as stream:
                if stream is None:
                    call()
                    return None
                stream.wait_event(start)
                for tensor in touched:
                    tensor.record_stream(stream)
                call()
                event = torch.cuda.Event()
                event.record(stream)
                return event

        return run

    @contextlib.contextmanager
    def _stream(self, device: torch.device) -> Any:
        if device.type != "cuda":
            yield None
            return
        torch.cuda.set_device(device)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            yield self._streams[device]

    def _run(self) -> None:
        while True:
            try:
                job = self._queue.get(True, IDLE_SECONDS)
            except queue.Empty:
                job = None
            if job is None:
                with self._lock:
                    if self._queue.empty() or self._closing:
                        self._thread = None
                        return
                continue
            work, call = job
            with self._turn:
                self._do(work, call)

    def _do(self, work: HetWork, call: Callable[[], Any]) -> None:
        ready, error = None, self._error
        try:
            ready = call() if error is None else None
        except NativeFailed as failed:
            if self._error is None:
                self._on_error(str(failed))
                return  # it ends with the verdict
            error = self._error
        except Exception as wrong:  # the thread's boundary: it becomes the operation's outcome
            error = wrong
        with self._lock:
            self._open.pop(id(work), None)
        work.finish(ready=ready, error=error)

    def fail(self, error: BaseException) -> None:
        """End everything queued or running with `error`; nothing more is accepted."""
        with self._lock:
            self._error = self._error or error
            pending, self._open = list(self._open.values()), {}
        for work in pending:
            work.finish(error=self._error)

    def close(self, *, seconds: float) -> None:
        """Run what is queued and end the thread."""
        with self._lock:
            thread, self._closing = self._thread, True
            self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
