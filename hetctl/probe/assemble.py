"""Raw material of one host to HostFacts: every parser in turn, and the notes of all of them in one place."""

from __future__ import annotations

from hetctl.comm.facts import HostFacts
from hetctl.probe.raw import Raw


def parse(raw: Raw) -> HostFacts:
    """The facts in raw material. Never fails on a strange host: what cannot be understood is unknown, with a reason."""
    raise NotImplementedError
