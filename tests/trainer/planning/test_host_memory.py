"""What is put on hosts is counted, and what they do not hold is refused with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import Infeasible
from hetctl.comm.contract.units import GiB
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.planning.pools import HOST_PROCESS_BYTES, HOST_USABLE_SHARE
from hetctl.trainer.recipe import load_recipe

ON_HOST = [("parallelism.activations", "host"), ("parallelism.pipeline", 2)]


def cluster(memory: int | None) -> Cluster:
    made = describe_cluster(parse_spec("h100:2x4,mi300x:1x4", CLASSES), CLASSES)
    return replace(made, hosts=tuple(replace(h, memory_bytes=memory) for h in made.hosts))


def planned(memory: int | None, *sets: tuple[str, object]) -> Planning:
    sizes = [("model.name", "llama-8b"), ("model.seq_len", 8192), ("batch.global_batch", 48)]
    return weigh(cluster(memory), load_recipe(None, [*sizes, *sets]))


def on_hosts(planning: Planning) -> dict[str, float]:
    """Host -> bytes that the chosen plan puts there."""
    held: dict[str, float] = {}
    for rank in (r for r in planning.plan.ranks if r.stages):
        held[rank.host] = held.get(rank.host, 0.0) + HOST_PROCESS_BYTES
    for _, _, stage in planning.predictions[0].candidate.stages:
        for rank in stage.ranks:
            held[planning.plan.ranks[rank].host] += stage.host_bytes
    return held


@pytest.mark.parametrize("memory", [400, 800, 2000])
def test_no_host_holds_more_than_it_has(memory: int) -> None:
    held = on_hosts(planned(memory * GiB, *ON_HOST))
    assert max(held.values()) <= HOST_USABLE_SHARE * memory * GiB
    assert max(held.values()) > 40 * GiB  # something is there


def test_unknown_memory_binds_nobody() -> None:
    assert on_hosts(planned(None, *ON_HOST))


def test_activations_that_no_host_holds_are_refused_with_the_reason() -> None:
    with pytest.raises(Infeasible, match=r"=host into its hosts' memory: stage \d of replica \d .* its share"):
        planned(64 * GiB, *ON_HOST)


def test_what_memory_a_host_has_changes_how_memory_is_saved() -> None:
    """Little of it: blocks are computed again; much: their activations wait there."""
    sizes = [("model.name", "llama-70b"), ("model.seq_len", 8192), ("batch.global_batch", 16)]
    spec = parse_spec("h100:2x8,mi300x:2x8", CLASSES)
    made = describe_cluster(spec, CLASSES)
    for memory in (1000 * GiB, 8000 * GiB):
        hosts = tuple(replace(h, memory_bytes=memory) for h in made.hosts)
        planning = weigh(replace(made, hosts=hosts), load_recipe(None, sizes))
        for pipeline in planning.predictions[0].candidate.pipelines:
            costs = pipeline.costs
            for use, layers, c in zip(pipeline.stage_uses, pipeline.layers, costs, strict=True):
                assert c.host.at(layers) <= use.pool.rates.host_memory_bytes


def test_a_checkpoint_s_copy_is_counted_once_over_a_stage_s_width() -> None:
    planning = planned(None, ("parallelism.pipeline", 2), ("parallelism.data", 1))
    [pipeline] = planning.predictions[0].candidate.pipelines
    costs = pipeline.costs
    total = sum(
        c.host.at(layers) * use.width * use.tensor
        for use, layers, c in zip(pipeline.stage_uses, pipeline.layers, costs, strict=True)
    )
    assert total == pytest.approx(12 * 8.03e9, rel=0.02)  # masters and two moments in fp32
