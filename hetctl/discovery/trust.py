"""Trusting hosts: the keys they show, compared with what is pinned, and pinning after a person agreed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.discovery.inventory import InventoryHost
from hetctl.launcher.hosts.deadline import Deadline
from hetctl.launcher.hosts.fanout import fan_out
from hetctl.launcher.ssh.config import SshConfig
from hetctl.launcher.ssh.connect import show_host_keys
from hetctl.launcher.ssh.known_hosts import HostKey, pin
from hetctl.probe.raw import printable


@dataclass(frozen=True)
class Shown:
    """What a host showed: keys nobody pinned yet (`fresh`), or the problem that keeps it from being trusted."""

    name: str
    known_as: str = ""
    port: int = 22
    file: Path | None = None
    fresh: tuple[HostKey, ...] = ()
    known: tuple[HostKey, ...] = ()
    problem: str = ""

    def document(self, *, pinned: bool) -> dict[str, Any]:
        """For scripts."""
        keys = [{"type": k.kind, "fingerprint": k.fingerprint} for k in self.fresh + self.known]
        return {"name": self.name, "keys": keys, "pinned": pinned, "problem": self.problem or None}


def fetch_keys(entries: Sequence[InventoryHost], *, timeout_s: float) -> list[Shown]:
    """The keys of all hosts, in their order. This machine needs none."""
    with SshConfig() as book:

        def look(entry: InventoryHost, deadline: Deadline) -> Shown:
            return _look(entry, book, deadline)

        remote = [entry for entry in entries if not entry.access.local]
        found: dict[str, Shown] = {}
        for outcome in fan_out(remote, look, deadline_s=timeout_s):
            problem = printable(outcome.error.message) if outcome.error else ""
            found[outcome.item.name] = outcome.value or Shown(outcome.item.name, problem=problem)
    return [found[entry.name] for entry in remote]


def pin_keys(shown: Shown) -> None:
    """Write the fresh keys into the known_hosts file that SSH reads for this host."""
    assert shown.file is not None
    pin(shown.file, shown.known_as, shown.fresh, port=shown.port)


def _look(entry: InventoryHost, book: SshConfig, deadline: Deadline) -> Shown:
    route, keys = show_host_keys(entry.access, book, deadline)
    pinned = book.known(route).keys_of(route.known_as, route.port)
    known = tuple(key for key in keys if key in pinned)
    fresh = tuple(key for key in keys if key not in pinned)
    clash = {key.kind for key in fresh} & {key.kind for key in pinned}
    problem = ""
    if clash or (pinned and not known):
        theirs = ", ".join(key.fingerprint for key in fresh)
        problem = f"its host key CHANGED: it shows {theirs}; if you know why, run {route.forget_line}"
    elif any(book.known(route).revoked(route.known_as, key, route.port) for key in keys):
        problem = "its host key is marked as revoked"
    return Shown(entry.name, route.known_as, route.port, route.known_hosts[0], () if problem else fresh, known, problem)
