"""The hosts of a job that something else has started, as the process that leads it discovers them."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path

from hetctl.comm.contract.cluster import Access, save_cluster
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.units import count_of
from hetctl.console import Sink
from hetctl.discovery.discover import discover
from hetctl.discovery.fabric import build
from hetctl.discovery.inventory import Inventory, InventoryHost, this_machine
from hetctl.launcher.engines.started import NONE, doors
from hetctl.trainer.planning.own_hardware import own_classes


def found_cluster(sink: Sink) -> Path:
    """What the hosts of the job that this process leads say of themselves, in a file that goes with the process: the
    run keeps its own. Raises ConfigError where one does not answer."""
    meant = inventory()
    sink.warn(f"discovering {count_of(len(meant.entries), 'host')} from {meant.origin}")
    reports = [answer.report for answer in discover(meant.entries)]
    if missing := [r for r in reports if not r.ok]:
        raise ConfigError(f"{missing[0].name}: {missing[0].reason}", hint=missing[0].hint)
    cluster = build(reports, named={}, classes=own_classes(None)).cluster
    handle, name = tempfile.mkstemp(prefix="hetctl-found-", suffix=".yaml")
    os.close(handle)
    atexit.register(Path(name).unlink, missing_ok=True)
    save_cluster(Path(name), cluster)
    return Path(name)


def inventory() -> Inventory:
    """The hosts of the job that this process leads."""
    if len(doors()) == 1:
        return this_machine()
    entries = (InventoryHost(d.host, Access(d.address, python=d.python, way=NONE), d.address) for d in doors().values())
    return Inventory(tuple(entries), "the job that started this process")
