"""The heartbeat: agents are told now and then that somebody is there, from their first word to their last."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetctl.launcher.agent.orders import Beat
from hetctl.launcher.supervisor.agent_link import AgentLink

BEAT_S = 2.0
JOIN_S = 10.0


class Heartbeat:
    """Beats of one thread for all agents of a run, also while other hosts are entered, or a disk holds up all else."""

    def __init__(self) -> None:
        self.others: Callable[[], bool] = lambda: False  # whether ranks of others may still ask a host's store
        self._links: list[AgentLink] = []
        self._due, self._over = threading.Event(), False
        self._thread: threading.Thread | None = None

    def add(self, link: AgentLink) -> None:
        self._links.append(link)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="beats", daemon=True)
            self._thread.start()

    def beat(self) -> None:
        """At once, not only when the next one is due."""
        self._due.set()

    def end(self) -> None:
        self._over = True
        self._due.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _beat(self) -> None:
        while not self._over:
            self._due.clear()
            for link in tuple(self._links):
                if not link.finished:
                    link.send(Beat(self.others()))
            self._due.wait(BEAT_S)
