"""The agent's side of the run's store: it opens the port, starts the process that serves it, and sees when it is gone.

Standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence

from hetctl.comm.contract.callers import admit, own_addresses
from hetctl.launcher.agent.orders import StoreOrder
from hetctl.launcher.agent.store import check_open_files
from hetctl.launcher.agent.workers import STOPPED_S, Child, die_with_parent


class StoreProcess(Child):
    """The process that serves the store. Raises OSError where it cannot be started."""

    def __init__(self, store: StoreOrder) -> None:
        check_open_files(store.clients)
        self._listener = _listen(store.address, store.ports)
        self._callers = {store.address, *own_addresses()}
        self.filters = admit(self._listener, self._callers)
        self.port = int(self._listener.getsockname()[1])
        process = subprocess.Popen(
            [*store.argv, str(self._listener.fileno()), store.address, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **store.env},
            pass_fds=(self._listener.fileno(),),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        super().__init__(process)
        self._reported = False

    def admit(self, address: str) -> None:
        """Let processes of a host connect, as it is one of the run's; those of any other never get so far."""
        if self.filters and address not in self._callers:
            self._callers.add(address)
            admit(self._listener, self._callers)

    def lost(self) -> str | None:
        """How it came to its end, said once; one that somebody stopped is of no use to anybody, and is ended."""
        if self._reported:
            return None
        how = f"was stopped (SIGSTOP) for {STOPPED_S:.0f} s" if self.stopped_for() > STOPPED_S else self._end()
        self._reported = how is not None
        if self._reported:
            self.end()
        return how

    def _end(self) -> str | None:
        code = self.process.poll()
        if code is None:
            return None
        return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"

    def end(self) -> None:
        self._listener.close()
        self.process.kill()
        self.process.wait()


def _listen(address: str, ports: Sequence[int]) -> socket.socket:
    """A listening socket on the first free port: bound here, so that nobody else can take it meanwhile."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((address, port), family=family, backlog=1024)
        except OSError as error:
            problem = os.strerror(error.errno) if error.errno else str(error)
    raise OSError(None, f"no free port on {address} among {ports[0]}-{ports[-1]} ({problem})")
