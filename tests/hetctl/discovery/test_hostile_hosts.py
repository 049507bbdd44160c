"""Hosts that misbehave: each has a named outcome, bounded memory, and nothing of it runs or shows here."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.discovery.discover import HostAnswer, discover
from hetctl.discovery.inventory import InventoryHost
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import ShellError
from hetctl.launcher.ssh.config import SshConfig
from hetctl.launcher.ssh.connect import connect
from hetctl.probe.raw import BEGIN, END
from tests.busy import busy
from tests.rigs import netns

WHY_NOT = netns.unavailable()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
TIMEOUT_S = 10.0
ESCAPES = "\033]0;owned\007\033[2J\033[31mred\033[0m"
SPECS = {
    "flood": netns.HostSpec(force="#!/bin/sh\nexec head -c 100000000 /dev/zero\n"),
    "drip": netns.HostSpec(force="#!/bin/sh\nwhile :; do echo x; sleep 0.2; done\n"),
    "escapes": netns.HostSpec(force=f"#!/bin/sh\nprintf '{ESCAPES}'\nexit 3\n"),
    "banner": netns.HostSpec(
        banner=f"Welcome {ESCAPES}\n" * 50, force='#!/bin/sh\necho motd\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    ),
    "nologin": netns.HostSpec(force="#!/bin/sh\necho This account is currently not available.\nexit 1\n"),
    "odd-shell": netns.HostSpec(force='#!/bin/sh\necho "% unknown command: $SSH_ORIGINAL_COMMAND" >&2\nexit 1\n'),
    "no-python": netns.HostSpec(env={"PATH": "/nowhere"}),
    "silent": netns.HostSpec(sshd=False, tools={}),
    "liar": netns.HostSpec(
        force=f'#!/bin/sh\necho {BEGIN.decode()}\necho \'{{"schema": 1, "files": 7}}\'\necho {END.decode()}\n'
    ),
}
EXPECTED = {
    "flood": "too-much-output",
    "drip": "timeout",
    "escapes": "no-answer",
    "banner": "ok",
    "nologin": "no-answer",
    "odd-shell": "no-answer",
    "no-python": "no-python",
    "silent": "timeout",
    "liar": "no-answer",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, HostAnswer]]:
    folder = tmp_path_factory.mktemp("hostile")
    with netns.hosts(list(SPECS.values()), folder) as rig, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(rig.home))
        at = dict(zip(SPECS, rig.hosts, strict=True))
        listener = "import socket; s = socket.create_server(('', 22)); held = [s.accept() for _ in range(9)]"
        mute = at["silent"].start(netns.PYTHON, "-c", listener)
        netns.await_port(at["silent"].address)
        entries = [InventoryHost(kind, Access(host.name)) for kind, host in at.items()]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin = time.monotonic()
        found = {a.report.name: a for a in discover(entries, timeout_s=TIMEOUT_S)}
        assert time.monotonic() - begin < TIMEOUT_S + 5 * busy()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
        mute.kill()
        mute.wait()
        yield found


@pytest.mark.parametrize("kind", SPECS)
def test_each_has_its_outcome(answers: dict[str, HostAnswer], kind: str) -> None:
    report = answers[kind].report
    assert report.status == EXPECTED[kind], report.reason


def test_nothing_a_host_says_reaches_a_terminal_raw(answers: dict[str, HostAnswer]) -> None:
    for answer in answers.values():
        assert (answer.report.reason or "").isprintable()
        assert len(answer.report.reason or "") < 500
    assert "red" in (answers["escapes"].report.reason or "")


def test_what_a_host_said_is_in_the_reason(answers: dict[str, HostAnswer]) -> None:
    assert "not available" in (answers["nologin"].report.reason or "")
    assert "unknown command" in (answers["odd-shell"].report.reason or "")


def test_a_name_with_a_leading_dash_never_reaches_a_program(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with SshConfig(tmp_path) as book, pytest.raises(ShellError) as caught:
        connect(Access(f"-oProxyCommand=touch {marker}"), book, Deadline(5))
    assert caught.value.problem == "invalid-name"
    assert not marker.exists()


def test_a_proxy_command_is_refused_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host x\n  ProxyCommand touch {marker}\n")
    with SshConfig(tmp_path) as book, pytest.raises(ShellError) as caught:
        connect(Access("x"), book, Deadline(5))
    assert caught.value.problem == "unsupported"
    assert not marker.exists()


@pytest.mark.parametrize(
    ("address", "port", "problem"),
    [("no-such-host.invalid", None, "name-not-found"), ("127.0.0.1", 1, "connection-refused")],
)
def test_other_ways_not_to_arrive(tmp_path: Path, address: str, port: int | None, problem: str) -> None:
    with SshConfig(tmp_path) as book, pytest.raises(ShellError) as caught:
        connect(Access(address, port=port), book, Deadline(10))
    assert caught.value.problem == problem
