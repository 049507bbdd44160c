"""The thread that runs one group's collectives in the order the program issued them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetctl.comm.work import HetWork

IDLE_SECONDS = 5.0


class Runner:
    """One ordered queue of collectives; its thread starts with the first and ends when there is nothing to do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[HetWork, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._streams: dict[torch.device, Any] = {}

    def put(self, work: HetWork, call: Callable[[], None], *, touched: Sequence[torch.Tensor]) -> None:
        """Run `call` after everything put before it, then finish `work`; on a side stream if the device has any."""
        device = touched[0].device if touched else torch.device("cpu")
        start = None
        if device.type == "cuda":
            start = torch.cuda.Event()
            start.record(torch.cuda.current_stream(device))
        with self._lock:
            self._queue.put((work, self._on_stream(call, device, start, touched)))
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
            try:
                work.finish(ready=call())
            except Exception as error:  # the thread's boundary: it becomes the operation's outcome
                work.finish(error=error)

    def close(self, *, seconds: float) -> None:
        """Run what is queued and end the thread."""
        with self._lock:
            thread, self._closing = self._thread, True
            self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
