"""A queue's thread that rests holds nothing of what it did."""

from __future__ import annotations

import threading
import time

from hetctl.comm.operation.task_queue import TaskQueue


class Held:
    """Something whose last holder takes a while to let it go, as that of a collective's work may."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    def entry(self) -> object:
        gone = self.gone

        class Entry:
            def __del__(self) -> None:
                time.sleep(0.2)
                gone.set()

        return Entry()


def test_at_rest_a_thread_has_let_go_of_what_it_did_last() -> None:
    done, held = threading.Event(), Held()
    queue = TaskQueue("test", lambda entry: done.set())
    queue.put(held.entry())
    assert done.wait(10)
    queue.rest(seconds=10)
    assert held.gone.is_set()


def test_a_queue_without_a_thread_is_at_rest_and_goes_on_afterwards() -> None:
    done = threading.Event()
    queue = TaskQueue("test", lambda entry: done.set())
    queue.rest(seconds=10)
    queue.put(1)
    assert done.wait(10)
    queue.rest(seconds=10)
    done.clear()
    queue.put(2)
    assert done.wait(10)
    queue.close(seconds=10)
