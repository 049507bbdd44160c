"""What each host is given grows with its own ranks, not with all ranks of all hosts."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

from hetctl.comm.contract.events import document
from hetctl.launcher.agent.orders import Prepare, unpacked
from hetctl.launcher.run_folder.folder import RunFolder
from hetctl.launcher.supervisor.agents import Agents, Site
from hetctl.launcher.supervisor.heartbeat import Heartbeat
from hetctl.launcher.supervisor.host_specs import Work, host_specs
from hetctl.launcher.supervisor.launch import Launch
from tests.bench.launch_scale import cluster_of

RANKS = 10


def specs_of(hosts: int) -> tuple[dict[str, Prepare], float]:
    """Of so many hosts that share nothing, and the CPU seconds that they took."""
    launch = Launch.of(cluster_of(hosts, RANKS))
    sites = tuple(
        Site(h.name, "python", "/code", RunFolder(Path("/runs") / h.name), False, 64, str(h.data_address), None)
        for h in launch.hosts
    )
    begin = time.process_time()
    specs = host_specs(Agents(sites, (), Heartbeat()), launch, Work(("python", "-m", "program")), run="r")
    return specs, time.process_time() - begin


def test_ten_thousand_ranks_cost_what_a_thousand_cost_each() -> None:
    _, few = min((specs_of(100) for _ in range(3)), key=lambda found: found[1])
    _, many = specs_of(1000)
    assert many < 10 * few * 4  # a step that looked at all ranks for each rank took 33 times as much as its share


def test_of_ten_thousand_ranks_nothing_that_a_process_starts_with_is_large() -> None:
    specs, _ = specs_of(1000)
    spec = specs["node0999"]
    assert {w.env["WORLD_SIZE"] for w in spec.workers} == {"10000"}
    assert [w.env["RANK"] for w in spec.workers] == [str(r) for r in range(9990, 10_000)]
    assert max(len(value) for worker in spec.workers for value in worker.env.values()) < 1024
    (placement,) = (json.loads(unpacked(text)) for text in spec.files.values())
    assert len(placement["hosts"]) == 10_000
    assert len(json.dumps(document(spec))) < 64 << 10  # the text of the placement alone is 179 kB


def test_the_store_hears_of_how_many_ranks_there_are() -> None:
    specs, _ = specs_of(8)
    (store,) = (spec.store for spec in specs.values() if spec.store)
    assert store.clients == len(specs) * RANKS


def test_agents_know_which_unpacked_folders_their_ranks_run_from() -> None:
    site = Site(
        "a", "python", "/cache/code/1a2b:/cache/code/1a2b/carried", RunFolder(Path("/runs")), False, 1, "::1", None
    )
    assert site.bundles == ("1a2b",)
    assert replace(site, program="/cache/code/3c4d").bundles == ("1a2b", "3c4d")
