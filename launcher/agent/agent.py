"""The agent: owns one host's workers. Started by a constant command; all variable data comes as JSON on stdin.

Protocol, one JSON object a line. In: orders (`orders.py`). Out: "hello", then events (`comm/contract/events.py`): its
own, whatever a worker reports, and at last "done" with the number of processes left.
End-of-file on stdin or missed heartbeats start the lease; when it lapses, every worker is ended. Within it a supervisor
may come back at the socket that "hello" names. Standard library only: a host needs nothing else for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import sys
import time
import traceback

from hetctl.comm.contract.events import (
    Done,
    Event,
    Exited,
    Failing,
    Lost,
    Ready,
    Refused,
    Started,
    Step,
    StoreLost,
    document,
)
from hetctl.launcher.agent import bootstrap, run_files, workers
from hetctl.launcher.agent.neighbours import READS, Neighbours
from hetctl.launcher.agent.oom import OomWatch
from hetctl.launcher.agent.orders import Beat, Kill, Order, Prepare, Signal, Start, Stop, order_of, unpacked
from hetctl.launcher.agent.port_watch import PortWatch
from hetctl.launcher.agent.store_process import StoreProcess
from hetctl.launcher.agent.supervisor_connection import SupervisorConnection
from hetctl.launcher.agent.workers import Worker

LAST_WORD_S = 5.0  # that a full line is waited for
TICK_S = 0.25  # what ranks say, and that they end, wakes it sooner; their hosts have better things to do
USED_EVERY_S = bootstrap.FRESH_S / 24  # who takes code in here removes what nobody used for so long
SOCKET = "agent.sock"
FIGURES = Step.kind  # of a worker's events: those that must not get lost


class Agent:
    """Starts the workers of a spec, relays their events, and leaves nothing behind."""

    def __init__(self, stdin: int, stdout: int, folder: str) -> None:
        self.selector = selectors.DefaultSelector()
        self.wire = SupervisorConnection(self.selector, stdin, stdout)
        self.folder = folder  # short-lived: the socket and what ranks keep in TMPDIR
        self.spec = Prepare(lease_s=bootstrap.PATIENCE_S)  # it hears beats already: other hosts may take long
        self.workers: list[Worker] = []
        self.tails: list[run_files.LogTail] = []
        self.store: StoreProcess | None = None
        self.needed = False  # the store, by other hosts' ranks
        self.neighbours, self.links = Neighbours(self.selector, self._welcome), PortWatch()
        self.oom = OomWatch()
        self.figures_kept = 0  # of those that nobody has heard
        self.started = False
        self.taken = 0  # number of the last order
        self.deadline: float | None = None  # when TERM becomes KILL
        self.next_use = 0.0  # of the code that ranks run from
        self.last_beat = time.monotonic()

    def run(self) -> int:
        """Until every worker is gone. Returns 0 when all of them ended well."""
        self.wire.listen(os.path.join(self.folder, SOCKET))
        self.wire.tell(event="hello", pid=os.getpid(), socket=self.wire.path)
        while not (self.started and not self._running() and not self._serves_others()):
            self._turn()
            self._check_lease()
            self._look_after()
            if not self.started and self.deadline is not None:
                break
        return self._finish()

    def _running(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.reported]

    def _turn(self) -> None:
        """What came in within a moment: workers' events, commands, a supervisor that is back."""
        for key, _ in self.selector.select(TICK_S):
            if isinstance(key.data, Worker):
                self._relay(key.data)
            elif key.data == "visitor":
                if self.wire.accept():
                    self.last_beat = time.monotonic()
            elif key.data != READS:
                for line in self.wire.commands():
                    number = line.pop("order", 0)
                    if number and number <= self.taken:
                        continue  # given again, since the line was lost before the launcher knew
                    self.taken = max(self.taken, number)
                    self._obey(order_of(line))
        self.wire.flush()
        if not self.wire.connected:
            self._keep_figures()

    def _tell(self, event: Event, rank: int | None = None) -> int:
        return self.wire.tell(**document(event), **({} if rank is None else {"rank": rank}))

    def _obey(self, order: Order) -> None:
        self.last_beat = time.monotonic()
        match order:
            case Beat(others):
                self.needed = others
                self.wire.tell(event="beat", took=self.taken)
            case Prepare():
                self.spec = order
                self._prepare()
            case Start() if not self.started:
                self._start(order)
            case Stop():
                if order.failed and self.deadline is None:
                    self._report_held_up()
                self._end(order.grace_s)
            case Kill():
                self._end(0.0)
            case Signal():
                for worker in self._running():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.process.pid, getattr(signal, order.name))

    def _report_held_up(self) -> None:
        """Those that somebody stopped, and that held up the others until one of them lost patience."""
        for worker in self.workers:
            if not worker.reported and worker.stopped_for() > workers.HELD_UP_S:
                self._report_stopped(worker)

    def _prepare(self) -> None:
        """Write the run's files, open the store's port, and say that this host is ready."""
        try:
            if self.spec.private:  # nobody else's: what ranks print may hold secrets
                os.makedirs(self.spec.private, exist_ok=True)
                os.chmod(self.spec.private, 0o700)
            run_files.write(os.path.join(self.folder, run_files.SWEEP_FILE), json.dumps(self.spec.sweep))
            for path, text in self.spec.files.items():
                run_files.write(path, unpacked(text))
            self.store = StoreProcess(self.spec.store) if self.spec.store else None
            where = self.spec.probe_address
            probe = self.neighbours.listen(where, self.spec.secret) if where else None
        except OSError as error:
            self._tell(Refused(f"{error.filename or ''} {error.strerror or error}".strip()))
            self._end(0.0)
            return
        self._tell(Ready(os.getpid(), self.store.port if self.store else None, probe))

    def _welcome(self, address: str) -> None:
        """A host of the run has proved to be one: its ranks may come to the store."""
        if self.store is not None:
            self.store.admit(address)

    def _start(self, order: Start) -> None:
        self.started = True
        extra = {"MASTER_PORT": str(order.store_port), "TMPDIR": self.folder}
        for spec in self.spec.workers:
            try:
                worker = Worker(spec, extra)
            except OSError as error:
                reason = f"{spec.argv[0]} cannot be started: {error.strerror or error}"
                self._tell(Exited(127, time.time(), asked=False, reason=reason), spec.rank)
                continue
            self.workers.append(worker)
            self.selector.register(worker.channel, selectors.EVENT_READ, worker)
            if self.spec.private:
                self.tails.append(run_files.LogTail(worker.rank, worker.log, worker.log_start))
            self._tell(Started(worker.process.pid), worker.rank)
        for line in run_files.kept(self.spec.unheard):
            if self.spec.goes_on:
                self.wire.tell(**{**line, "late": True})
        self.neighbours.watch(order.peers)
        self.links.start(self.spec.ports)

    def _serves_others(self) -> bool:
        """Whether ranks of other hosts may still ask this one's store: it outlives them, unless time is up."""
        return self.store is not None and self.needed and (self.deadline is None or time.monotonic() < self.deadline)

    def _check_lease(self) -> None:
        now = time.monotonic()
        lease = self.spec.lease_s if self.wire.connected or self.spec.reconnect else 0.0
        if now - self.last_beat > lease:
            self.needed = False
            self._end(self.spec.grace_s)
        if self.deadline is not None and now >= self.deadline:
            for worker in self._running():
                worker.signal_group(signal.SIGKILL)

    def _end(self, grace_s: float) -> None:
        until = time.monotonic() + grace_s
        if self.deadline is None:
            for worker in self._running():
                worker.signal_group(signal.SIGTERM)
                worker.signal_group(signal.SIGCONT)
        self.deadline = until if self.deadline is None else min(self.deadline, until)

    def _relay(self, worker: Worker) -> None:
        events = worker.read_events()
        if events is None:
            self.selector.unregister(worker.channel)
            worker.channel.close()  # from here on its number may be another connection's
        for line in events or []:
            self.wire.tell(**{**line, "rank": worker.rank})

    def _look_after(self) -> None:
        """What is due at every turn: the store, exits, stopped ranks, logs, neighbours, orphans."""
        if self.store is not None and (how := self.store.lost()) is not None:
            self._tell(StoreLost(how))
        for worker in self._running():
            code = worker.process.poll()
            if code is not None:
                self._report(worker, code)
            elif self.deadline is None and worker.stopped_for() > workers.STOPPED_S:
                self._report_stopped(worker)
            elif not worker.failing and (error := worker.error()) is not None:
                worker.failing = True  # its end may take long: libraries wait for peers, or hang
                self._tell(Failing(time.time(), error), worker.rank)
        for tail in self.tails:
            if text := tail.read():
                self._tell(text, tail.rank)
        for event in (*self.neighbours.look(), *self.links.look()):
            self._tell(event)
        if self.spec.bundles and time.monotonic() > self.next_use:
            self.next_use = time.monotonic() + USED_EVERY_S
            for bundle in self.spec.bundles:
                bootstrap.have(bundle)

    def _report(self, worker: Worker, code: int, *, reason: str | None = None) -> None:
        if not worker.channel.closed:
            self._relay(worker)  # what it said last
        worker.reported = True
        worker.signal_group(signal.SIGKILL)  # children it left behind
        oom = self.oom.killed(worker.process.pid) if code == -signal.SIGKILL else None
        asked = self.deadline is not None and reason is None
        if code == -signal.SIGKILL and asked:  # whoever is killed before the deadline was killed by somebody else
            asked = time.monotonic() >= (self.deadline or 0.0)
        error = worker.error()
        if worker.failing and code in (-signal.SIGTERM, -signal.SIGKILL):
            code = 1  # it failed by itself, and was only helped to end
        mute = error is None and (code > 0 or code == -signal.SIGABRT)
        if mute and not reason and run_files.is_full(os.path.dirname(worker.log)):
            how = f"ended with exit code {code}" if code > 0 else "was ended by SIGABRT"
            reason = f"it {how}, and could not say why: No space left on its disk"
        said = run_files.last_words(worker.log) if mute else None
        waited = tuple(run_files.pending(self.spec.flight, worker.rank) or ()) if code else None
        told = Exited(
            code, time.time(), asked, error, said, waited, reason=None if oom is not None else reason, oom=oom
        )
        self._tell(told, worker.rank)

    def _report_stopped(self, worker: Worker) -> None:
        seconds = worker.stopped_for()
        worker.signal_group(signal.SIGKILL)
        worker.process.wait()
        self._report(worker, -signal.SIGSTOP, reason=f"somebody stopped it (SIGSTOP) for {seconds:.0f} s")

    def _finish(self) -> int:
        """End the store and whatever ranks left behind, verify it, and say so as the last thing."""
        store = self.store.process.pid if self.store else None
        workers.reap_orphans(spare=(store,) if store else ())
        if self.store is not None:
            self.store.end()
        left = workers.kill_descendants()
        self.neighbours.close()
        self.links.close()
        for tail in self.tails:
            if text := tail.last():
                self._tell(text, tail.rank)
        run_files.sweep_for(self.folder)
        self._part(self._tell(Done(left)))
        run_files.remove(self.folder)
        return 0 if all(w.process.returncode == 0 for w in self.workers) else 1

    def _keep_figures(self) -> None:
        """For the launcher that goes on with the run: checkpoints outlive this agent, as their figures do."""
        figures = self.wire.unheard(FIGURES)
        if len(figures) != self.figures_kept:
            run_files.keep(self.spec.unheard, figures)
            self.figures_kept = len(figures)

    def _part(self, last: int) -> None:
        """Until the supervisor has heard the last word, or has been away for as long as its lease."""
        for worker in self.workers:
            if not worker.channel.closed:
                self.selector.unregister(worker.channel)
        lease = self.spec.lease_s if self.spec.workers else 0.0
        while not self.wire.confirmed(last) and time.monotonic() - self.last_beat < lease:
            if not (self.wire.connected or self.spec.reconnect):
                break
            self._turn()
        self._keep_figures()
        self.wire.close()


def main() -> None:
    """Be the agent of one run on this host; a guardian stays behind it."""
    folder = run_files.own_folder()
    stdout = sys.stdout.fileno()

    def last_word(left: int, failed: bool) -> None:
        run_files.sweep_for(folder)
        run_files.remove(folder)
        with contextlib.suppress(OSError):  # the agent may have got stuck within a line, for want of room
            select.select([], [stdout], [], LAST_WORD_S)
            os.write(stdout, b"\n" + json.dumps(document(Lost(left, failed))).encode() + b"\n")

    workers.guard(last_word)
    workers.adopt_orphans()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides
    try:
        code = Agent(sys.stdin.fileno(), stdout, folder).run()
    except Exception:  # its guardian ends what it began, and the launcher reads why
        traceback.print_exc()
        code = workers.FAILED
    sys.exit(code)


if __name__ == "__main__":
    main()
