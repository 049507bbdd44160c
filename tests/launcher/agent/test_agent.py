"""An agent by itself: which of its ranks' ends it says it had asked for."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract import variables
from hetctl.comm.contract.events import document
from hetctl.launcher.agent.orders import Beat, Kill, Order, Prepare, Start, Stop, StoreOrder, WorkerOrder
from hetctl.launcher.agent.workers import FAILED
from tests.busy import busy

STEP = r'{"event": "step", "step": 7}\n'
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


def until(events: Iterator[dict[str, Any]], kind: str, rank: int | None = None) -> dict[str, Any]:
    return next(e for e in events if e["event"] == kind and e.get("rank") == rank)


def test_who_is_killed_before_its_time_is_over_was_killed_by_somebody_else(tmp_path: Path) -> None:
    """Its peers may have noticed first, and had all ranks told to end: the one that was killed is why, all the same."""
    workers = tuple(WorkerOrder(r, (sys.executable, "-c", DEAF), log=str(tmp_path / f"{r}.log")) for r in range(3))
    with an_agent(exit_code=1) as (events, order):
        order(Prepare(workers, lease_s=60.0))
        until(events, "ready")
        order(Start(0))
        pids = {rank: int(until(events, "started", rank)["pid"]) for rank in range(3)}
        while any(not (tmp_path / f"{r}.log").read_text() for r in range(3)):
            time.sleep(0.01)  # one that is not deaf yet would end as it is asked to
        order(Stop(60.0, failed=True))
        os.kill(pids[1], signal.SIGKILL)
        told = until(events, "exit", 1)
        assert (told["code"], told.get("asked", False)) == (-signal.SIGKILL, False)
        order(Stop(0.0))
        ends = [e for e in takewhile(lambda e: e["event"] != "done", events) if e["event"] == "exit"]
        assert sorted((e["rank"], e["code"], e["asked"]) for e in ends) == [(r, -signal.SIGKILL, True) for r in (0, 2)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
@pytest.mark.parametrize("started", [False, True])
def test_a_store_that_is_lost_is_told_at_once_before_and_while_ranks_run(
    tmp_path: Path, number: signal.Signals, started: bool
) -> None:
    deaf = WorkerOrder(0, (sys.executable, "-c", DEAF), log=str(tmp_path / "0.log"))
    with an_agent(exit_code=1 if started else 0) as (events, order):
        order(Prepare((deaf,), store=store_in(tmp_path), lease_s=60.0))
        until(events, "ready")
        if started:
            order(Start(0))
            until(events, "started", 0)
        at = time.monotonic()
        os.kill(pid_of_store(tmp_path), number)
        assert until(events, "store lost")["how"] == f"was ended by {number.name}"
        assert time.monotonic() - at < 2.0 * busy()
        order(Kill())
        until(events, "done")


def test_the_store_outlives_its_own_hosts_ranks_while_other_hosts_are_there(tmp_path: Path) -> None:
    over = WorkerOrder(0, (sys.executable, "-c", ""), log=str(tmp_path / "0.log"))
    with an_agent(exit_code=0) as (events, order):
        order(Beat(others=True))
        order(Prepare((over,), store=store_in(tmp_path), lease_s=60.0))
        until(events, "ready")
        store = pid_of_store(tmp_path)
        order(Start(0))
        until(events, "exit", 0)
        order(Beat(others=True))
        assert next(events)["event"] == "beat", "it goes on: the other hosts' ranks may still ask the store"
        os.kill(store, 0)
        order(Beat())
        until(events, "done")
        assert not Path(f"/proc/{store}").exists()


def test_an_order_that_is_given_again_is_obeyed_once(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hetctl.launcher.agent.agent"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        orders = (Prepare(lease_s=60.0), Beat()), (Prepare(lease_s=60.0), Beat(), Kill())
        for number, order in enumerate(o for some in orders for o in some):
            again = {} if isinstance(order, Beat) else {"order": 2 if isinstance(order, Kill) else 1}
            agent.stdin.write(json.dumps({**document(order), **again, "got": number}) + "\n")
        agent.stdin.flush()
        told = [json.loads(line) for line in agent.stdout]
    kinds = [e["event"] for e in told]
    assert kinds == ["hello", "ready", "beat", "beat", "done"]
    assert [e["took"] for e in told if e["event"] == "beat"] == [1, 1]


def test_an_agent_whose_line_is_cut_before_it_has_orders_ends_soon() -> None:
    """No end of file comes over a cable that is down; while other hosts are entered, beats do."""
    agent = "from hetctl.launcher.agent import bootstrap, agent; bootstrap.PATIENCE_S = 1.0; agent.main()"
    with subprocess.Popen([sys.executable, "-c", agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert b"hello" in process.stdout.readline()
        for _ in range(8):
            process.stdin.write(json.dumps(document(Beat())).encode() + b"\n")
            process.stdin.flush()
            assert b"beat" in process.stdout.readline()
            time.sleep(0.25)
        silent = time.monotonic()
        assert b"done" in process.stdout.readline()
        assert time.monotonic() - silent < 3.0 * busy()


def test_an_agent_that_fails_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    """Its guardian does what it cannot do any more, as it does for one that was killed."""
    deaf = WorkerOrder(0, (sys.executable, "-c", DEAF), log=str(tmp_path / "0.log"))
    argv = [sys.executable, "-m", "hetctl.launcher.agent.agent"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    half = tmp_path / "step.partial"
    half.mkdir()
    with subprocess.Popen(argv, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}, **pipes) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stderr is not None
        for order in (Prepare((deaf,), lease_s=60.0, sweep=(str(tmp_path / "*.partial"),)), Start(0)):
            agent.stdin.write(json.dumps(document(order)) + "\n")
        agent.stdin.flush()
        events = map(json.loads, filter(str.strip, agent.stdout))
        worker = int(until(events, "started", 0)["pid"])
        agent.stdin.write('{"do": "what nobody knows"}\n')
        agent.stdin.flush()
        assert until(events, "lost") == {"event": "lost", "left": 0, "failed": True}
        assert agent.stderr.read().splitlines()[-1] == "KeyError: 'what nobody knows'"
    assert agent.returncode == FAILED
    assert not Path(f"/proc/{worker}").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["0.log"]


def test_a_rank_whose_channel_closed_early_is_not_heard_through_a_neighbours(tmp_path: Path) -> None:
    """Its channel's number may be another connection's by then: here of a knock that is answered by hanging up."""
    hangs_up = f"import os, time; os.close(int(os.environ[{variables.EVENTS!r}])); time.sleep(600)"
    worker = WorkerOrder(0, (sys.executable, "-c", hangs_up), log=str(tmp_path / "0.log"))
    with socket.create_server(("127.0.0.1", 0)) as peer, an_agent(exit_code=1) as (events, order):
        order(Prepare((worker,), probe_address="127.0.0.1", lease_s=60.0))
        agent = int(until(events, "ready")["pid"])
        order(Start(0, {"peer": ("127.0.0.1", peer.getsockname()[1])}))
        rank = int(until(events, "started", 0)["pid"])
        knocks = [peer.accept()[0] for _ in range(2)]  # in the second round the number is free
        os.kill(agent, signal.SIGSTOP)
        knocks[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for knock in knocks:
            knock.close()
        os.kill(rank, signal.SIGKILL)
        while ") Z " not in Path(f"/proc/{rank}/stat").read_text():
            time.sleep(0.01)
        os.kill(agent, signal.SIGCONT)
        assert until(events, "exit", 0)["code"] == -signal.SIGKILL
        until(events, "done")


def test_code_that_ranks_run_from_stays_young(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes in code on that host removes what was not used for a day, and runs take longer."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("used", "unused"):
        folder = tmp_path / "hetctl" / "code" / name
        folder.mkdir(parents=True)
        os.utime(folder, (1.0, 1.0))
    with an_agent(exit_code=0) as (events, order):
        order(Prepare((WorkerOrder(0, ("true",), log=str(tmp_path / "0.log")),), bundles=("used",), lease_s=60.0))
        until(events, "ready")
        order(Start(0))
        until(events, "done")
    ages = {name: (tmp_path / "hetctl" / "code" / name).stat().st_mtime for name in ("used", "unused")}
    assert ages["unused"] == 1.0
    assert time.time() - ages["used"] < 60.0


def test_figures_are_kept_as_soon_as_nobody_hears_them(tmp_path: Path) -> None:
    """Whoever ends the agent then, as who removes its pod does, takes no figures away."""
    program = f"import os, time; os.write(int(os.environ[{variables.EVENTS!r}]), b'{STEP}'); time.sleep(600)"
    unheard = tmp_path / "unheard.json"
    worker = WorkerOrder(0, (sys.executable, "-c", program), log=str(tmp_path / "0.log"))
    with an_agent(exit_code=256 - signal.SIGKILL) as (events, order):  # the guardian says how its agent ended
        order(Prepare((worker,), lease_s=600.0, reconnect=True, unheard=str(unheard)))
        agent = int(until(events, "ready")["pid"])
        order(Start(0))
        until(events, "step", 0)
        order(None)
        while not unheard.exists():
            time.sleep(0.01)
        os.kill(agent, signal.SIGKILL)
    assert [figures["step"] for figures in json.loads(unheard.read_text())] == [7]


@contextmanager
def an_agent(*, exit_code: int) -> Iterator[tuple[Iterator[dict[str, Any]], Callable[[Order | None], None]]]:
    """An agent's events, and how it is given orders; without one the line is dropped."""
    argv = [sys.executable, "-m", "hetctl.launcher.agent.agent"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        line = agent.stdin

        def order(what: Order | None) -> None:
            if what is None:
                line.close()
                return
            line.write(json.dumps(document(what)) + "\n")
            line.flush()

        yield map(json.loads, filter(str.strip, agent.stdout)), order
        line.close()
        assert agent.wait(30) == exit_code


def store_in(folder: Path) -> StoreOrder:
    """One that serves nobody, and writes down who it is."""
    program = f"import os, pathlib, time; pathlib.Path({str(folder / 'store')!r}).write_text(str(os.getpid())); "
    return StoreOrder("127.0.0.1", (0,), (sys.executable, "-c", program + "time.sleep(600)"), {})


def pid_of_store(folder: Path) -> int:
    while not ((file := folder / "store").exists() and file.read_text()):
        time.sleep(0.01)
    return int(file.read_text())
