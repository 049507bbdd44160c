"""Agents that knock at each other: who proves to be of the run is welcome, and strangers cost nothing."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from hetctl.comm.contract.callers import MOST_OF_ONE, Doorkeeper
from hetctl.launcher.agent import neighbours
from hetctl.launcher.agent.neighbours import Neighbours

HERE = "127.0.0.1"


@pytest.fixture
def welcomed() -> list[str]:
    return []


@pytest.fixture
def door(welcomed: list[str]) -> Iterator[tuple[Neighbours, int]]:
    made = Neighbours(selectors.DefaultSelector(), welcomed.append)
    yield made, made.listen(HERE, "secret")
    made.close()


def knocking(port: int, secret: str) -> Neighbours:
    made = Neighbours(selectors.DefaultSelector(), lambda address: None)
    made.listen(HERE, secret)
    made.watch({"peer": (HERE, port)})
    return made


def turns(*of: Neighbours, until: Callable[[], object], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not until() and time.monotonic() < end:
        for each in of:
            assert not each.look(), "nobody is silent"
        time.sleep(0.01)
    return bool(until())


def test_who_knows_the_secret_is_welcome(door: tuple[Neighbours, int], welcomed: list[str]) -> None:
    ours = knocking(door[1], "secret")
    assert turns(door[0], ours, until=lambda: welcomed)
    assert set(welcomed) == {HERE}
    ours.close()


def test_who_does_not_is_not_and_is_there_all_the_same(
    door: tuple[Neighbours, int], welcomed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "EVERY_S", 0.2)
    theirs = knocking(door[1], "another")
    assert not turns(door[0], theirs, until=lambda: welcomed, seconds=1.5)
    theirs.close()


def test_what_was_said_once_is_worth_nothing_later(door: tuple[Neighbours, int], welcomed: list[str]) -> None:
    with socket.create_connection((HERE, door[1])) as first:
        turns(door[0], until=lambda: False, seconds=0.1)
        proof = neighbours.proof(b"secret", first.recv(16))
        first.sendall(proof)
        assert turns(door[0], until=lambda: welcomed)
    welcomed.clear()
    with socket.create_connection((HERE, door[1])) as again:
        again.sendall(proof)
        assert not turns(door[0], until=lambda: welcomed, seconds=0.3)


def test_strangers_that_stay_are_few_and_crowd_out_nobody(door: tuple[Neighbours, int], welcomed: list[str]) -> None:
    strangers = [socket.create_connection((HERE, door[1])) for _ in range(200)]
    ours = knocking(door[1], "secret")
    assert turns(door[0], ours, until=lambda: welcomed)
    assert len(door[0]._door._callers) <= MOST_OF_ONE  # type: ignore[union-attr]
    for stranger in strangers:
        stranger.close()
    ours.close()


def test_a_peer_that_hangs_up_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that has too many callers: it may reset the connection before it is judged."""
    monkeypatch.setattr(neighbours, "EVERY_S", 0.1)
    with socket.create_server((HERE, 0)) as listener:
        listener.settimeout(0.01)
        ours = knocking(listener.getsockname()[1], "secret")
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert not ours.look()
            try:
                caller, _ = listener.accept()
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                caller.close()
            except TimeoutError:
                pass
        ours.close()


def test_a_silent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "EVERY_S", 0.1)
    with socket.create_server((HERE, 0), backlog=0) as full:
        held = [socket.socket() for _ in range(4)]
        for each in held:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        ours = knocking(full.getsockname()[1], "secret")
        end, said = time.monotonic() + 5.0, []
        while not said and time.monotonic() < end:
            said = ours.look()
            time.sleep(0.02)
        assert [event.peer for event in said] == ["peer"]
        for each in held:
            each.close()
        ours.close()


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNABORTED, errno.EMFILE])
def test_a_caller_whose_network_is_gone_costs_nobody_else(number: int) -> None:
    """Linux tells what happened to a connection before anybody took it as an error of accept()."""

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, str]:
            raise OSError(number, "planted")

    with Listener() as listener:
        assert Doorkeeper(listener, b"secret").turn() == []


@pytest.mark.parametrize(("number", "silent"), [(errno.ENOTCONN, True), (errno.ECONNREFUSED, False)])
def test_who_cannot_be_reached_is_silent_and_who_refuses_is_not(
    number: int, silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that says so, or a port of this host's own that is down, is no answer of the peer's."""
    monkeypatch.setattr(neighbours, "EVERY_S", 0.05)
    monkeypatch.setattr(socket, "socket", failing_with(number))
    made = Neighbours(selectors.DefaultSelector(), lambda address: None)
    made.watch({"peer": (HERE, 9)})
    end, told = time.monotonic() + 0.5, []
    while not told and time.monotonic() < end:
        told += made.look()
        time.sleep(0.01)
    made.close()
    assert bool(told) is silent


def test_an_agent_that_can_open_no_socket_goes_on_and_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(neighbours, "EVERY_S", 0.0)
    monkeypatch.setattr(socket, "socket", full)
    made = Neighbours(selectors.DefaultSelector(), lambda address: None)
    made.watch({"peer": (HERE, 9)})
    assert [made.look() for _ in range(5)] == [[]] * 5


def failing_with(number: int) -> type[socket.socket]:
    """Sockets that find no way to anybody, as the kernel says it on the next call."""

    class Failing(socket.socket):
        def connect_ex(self, place: object) -> int:
            return number

        def recv(self, *_: object) -> bytes:
            raise OSError(number, "no way there")

        def getpeername(self) -> object:
            raise OSError(errno.ENOTCONN, "not connected")

    return Failing
