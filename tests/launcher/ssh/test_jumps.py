"""A jump host: tried once for all that go through it, and again where it had worked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hetctl.comm.contract.cluster import Access
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.shell import ShellError
from hetctl.launcher.ssh import connect
from hetctl.launcher.ssh.config import _Jump

ROUTE: Any = SimpleNamespace(jumps=("bastion",), hostname="node", port=22)


def client(*, alive: bool) -> MagicMock:
    made = MagicMock()
    made.get_transport.return_value.is_active.return_value = alive
    made.get_transport.return_value.open_channel.return_value = "a channel"
    return made


@pytest.mark.parametrize("worked", [True, False])
def test_a_jump_host_that_worked_is_tried_again_after_it_failed(worked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the lease of a run's agents it may be back; one that never worked fails all hosts behind it at once."""
    jump = _Jump()
    jump.client = client(alive=False) if worked else None
    book: Any = SimpleNamespace(jump=lambda _: jump)
    answers = iter([ShellError("connection-refused", "it refuses"), client(alive=True)])

    def opened(*_: object) -> MagicMock:
        answer = next(answers)
        if isinstance(answer, ShellError):
            raise answer
        return answer

    monkeypatch.setattr(connect, "_open_jump", opened)
    with pytest.raises(ShellError, match="the jump host failed: it refuses"):
        connect._through(ROUTE, Access(), book, Deadline(5))
    if worked:
        assert connect._through(ROUTE, Access(), book, Deadline(5)) == "a channel"
    else:
        with pytest.raises(ShellError, match="the jump host failed: it refuses"):
            connect._through(ROUTE, Access(), book, Deadline(5))
