"""A session over a transport that is gone: no call of it raises what a library says; its end tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import paramiko
import pytest

from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.ssh.session import SshSession, SshShell


class Gone:
    """A paramiko channel whose transport has died: everything that would send raises."""

    closed = False
    eof_received = False

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.read_end, self.write_end = os.pipe()

    def fileno(self) -> int:
        return self.read_end

    def setblocking(self, _: bool) -> None:
        pass

    def send_ready(self) -> bool:
        return True

    def recv_ready(self) -> bool:
        raise self.error

    def send(self, _: bytes) -> int:
        raise self.error

    shutdown_write = close = recv_ready

    def exit_status_ready(self) -> bool:
        return False


@pytest.fixture(params=[EOFError(), OSError("Socket is closed"), paramiko.SSHException("no transport")])
def channel(request: Any) -> Iterator[Gone]:
    made = Gone(request.param)
    yield made
    os.close(made.read_end)
    os.close(made.write_end)


def test_a_dead_transport_raises_nowhere(channel: Any) -> None:
    session = SshSession(channel)
    assert session.write(b"abc") == 3
    assert session.read(0.0) is None
    session.finish()
    session.abort()
    session.close()
    assert session.exit_code is None


def test_the_hosts_shell_knows_where_a_home_is_and_takes_all_else_as_it_stands() -> None:
    client = MagicMock()
    channel = client.get_transport().open_session()
    channel.fileno.return_value = 0
    SshShell(client, "red1").start(["~/my venv/bin/python", "-c", "print('~/a')", "x~/b"], deadline=Deadline(1.0))
    channel.exec_command.assert_called_once_with("""~/'my venv/bin/python' -c 'print('"'"'~/a'"'"')' 'x~/b'""")
