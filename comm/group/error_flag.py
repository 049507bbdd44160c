"""The out-of-band error flag of a group: whoever fails first tells all others through the store, and who is silent.

A rank that rings asks everybody to answer; those that do not within a moment are named in the verdict, which ends the
pending operations of all ranks. So a dead, stopped or partitioned rank is found whichever library was waiting for it.
Answers say what a rank called, and so who called something else; they are also asked for where a collective takes long.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

from hetctl.comm.group.call_order import absence, disagreement
from hetctl.comm.operation.work import BridgeError, Store

POLL_SECONDS = 0.5
COMPARED = 4  # polls: so often ranks look whether somebody waits for long
PAUSE_SECONDS = 0.05
ANSWER_SECONDS = 2.0
VERDICT_SECONDS = 3.5
STORE_SECONDS = 4.0  # a store that takes longer is behind a broken network: calls to it may block for minutes


class ErrorFlag:
    """One group's flag: `report` here; when anybody has, `on_verdict` is called once, in the alarm's thread."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        names: Sequence[str],
        on_verdict: Callable[[BridgeError], None],
        overdue: Callable[[], str | None] = lambda: None,
        waits: Callable[[], bool] = lambda: False,
        told: Callable[[], str] = lambda: "[]",
    ) -> None:
        self._overdue = overdue  # says what is late here that nobody waits for
        self._waits, self._told = waits, told  # whether a collective takes long here; what was called here
        self._published = ""
        self._store, self._rank, self._names, self._on_verdict = store, rank, names, on_verdict
        self._wake = threading.Event()
        self._closed = False
        self._mine: str | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._judged = threading.Event()
        self._verdict: BridgeError | None = None

    def watch(self) -> None:
        """Start watching."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="het alarm", daemon=True)
                self._thread.start()

    def report(self, sentence: str) -> None:
        """Tell everybody that an operation failed here; returns at once."""
        with self._lock:
            first, self._mine = self._mine is None, self._mine or sentence
        self.watch()
        self._wake.set()
        if first:
            threading.Thread(target=self._wait_for_store, name="het alarm, waiting", daemon=True).start()

    def _wait_for_store(self) -> None:
        if not self._judged.wait(STORE_SECONDS) and not self._closed:
            self._end(f"{self._mine}; the job's store does not answer: this rank is cut off from it")

    def report_and_wait(self, sentence: str) -> BridgeError:
        """Ring, and wait for the verdict: for errors that are met in the program's own thread."""
        self.report(sentence)
        self._judged.wait(ANSWER_SECONDS + VERDICT_SECONDS)
        return self._verdict or BridgeError(sentence)

    def close(self, *, seconds: float = VERDICT_SECONDS + ANSWER_SECONDS) -> None:
        """End the thread; it is waited for so long."""
        with self._lock:
            self._closed = True
        self._wake.set()
        self._judged.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            verdict = self._watch()
        except Exception as error:  # the store is gone: nobody can be told, but what is pending here must end
            if self._closed or self._mine is None:
                return
            detail = str(error).strip().splitlines()[:1]
            verdict = f"{self._mine}; the job's store does not answer either: {''.join(detail)[:120]}"
        if verdict is not None:
            self._end(verdict)

    def _end(self, verdict: str) -> None:
        """Deliver a verdict, the first one only."""
        with self._lock:
            if self._verdict is not None:
                return
            self._verdict = BridgeError(verdict)
        self._judged.set()
        self._on_verdict(self._verdict)

    def _watch(self) -> str | None:
        store = self._store
        for poll in itertools.count(1):
            self._wake.wait(POLL_SECONDS)
            if self._mine is None and (late := self._overdue()) is not None:
                self.report(late)
            if self._mine is None and not poll % COMPARED and (differs := self._compared(store)) is not None:
                self.report(differs)
            if self._mine is not None:
                mine = f"{self._rank} {self._mine}"  # several may say the same, and one of them judges
                first = store.compare_set("alarm", "", mine).decode()
                return self._judge(store, self._mine) if first == mine else self._answer(store, _said(first))
            if self._closed:
                return None
            if store.check(["alarm"]):
                return self._answer(store, _said(store.get("alarm").decode()))
        return None

    def _compared(self, store: Store) -> str | None:
        """Where a collective takes long on any rank all say what they called, and who asked first compares."""
        waits, me = self._waits(), str(self._rank)
        if waits:
            asker = store.compare_set("asked", "", me).decode()
        else:  # never deleted: somebody may be about to get it, and would block
            asker = store.get("asked").decode() if store.check(["asked"]) else ""
            asker = store.compare_set("asked", me, "").decode() if asker == me else asker
        if not asker:
            return None
        if (told := self._told()) != self._published:
            store.set(f"called/{self._rank}", told)
            self._published = told
        everybody = range(len(self._names))
        if asker != me or not store.check([f"called/{r}" for r in everybody]):
            return None
        return disagreement(_texts(store, "called", everybody), self._names)

    def _judge(self, store: Store, sentence: str) -> str:
        """Ask who is there, and publish the verdict with those who are not."""
        others = [r for r in range(len(self._names)) if r != self._rank]
        end = time.monotonic() + ANSWER_SECONDS
        while others and time.monotonic() < end:
            others = [r for r in others if not store.check([f"here/{r}"])]
            time.sleep(PAUSE_SECONDS)
        silent = ", ".join(self._names[r] for r in others[:8]) + (" and more" if len(others) > 8 else "")
        answered = [r for r in range(len(self._names)) if r not in (self._rank, *others)]
        told = {self._rank: self._told(), **_texts(store, "here", answered)}
        differs, said = disagreement(told, self._names), [sentence]
        if others:
            said.append(f"no answer from {silent}")
        elif not differs and (absent := absence(told, self._names)):
            said.append(absent)
        verdict = "; ".join([differs, *said] if differs and differs != sentence else said)
        store.set("verdict", verdict)
        return verdict

    def _answer(self, store: Store, sentence: str) -> str:
        """Say that this rank is there, and wait a moment for the verdict."""
        store.set(f"here/{self._rank}", self._told())
        end = time.monotonic() + VERDICT_SECONDS
        while time.monotonic() < end:
            if store.check(["verdict"]):
                return str(store.get("verdict").decode())
            time.sleep(PAUSE_SECONDS)
        return sentence


def _texts(store: Store, key: str, ranks: Sequence[int]) -> dict[int, str]:
    """What each of these ranks has set under a key of its own, in one request."""
    texts = store.multi_get([f"{key}/{rank}" for rank in ranks]) if ranks else []
    return {rank: text.decode() for rank, text in zip(ranks, texts, strict=True)}


def _said(error_flag: str) -> str:
    """The sentence of whoever rang first."""
    return error_flag.partition(" ")[2]
