"""Laws that plans of any cluster keep: more of anything is never slower, nothing that can be pinned is faster.

HETCTL_PLANNER_INSTANCES=10000 tries as many random clusters; a few by default.
"""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import HetctlError
from hetctl.trainer.planning.costs import usable_bytes
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import Planning, weigh
from hetctl.trainer.recipe import load_recipe

INSTANCES = int(os.environ.get("HETCTL_PLANNER_INSTANCES", "60")) // 15
ROUGHLY = 1.005  # more of something may seem so much slower: larger searches leave small gains out
NAMES = ("rtx4090", "mi325x", "v100", "l40s", "a100", "h100", "h200", "a100-40g", "mi300x", "a40", "t4", "mi210")
SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", "zero-bubble", "interleaved")


@dataclass(frozen=True)
class Island:
    """Some devices of one class; memory in GiB where it is capped."""

    name: str
    count: int
    speed: float = 1.0
    memory: int | None = None

    @property
    def spec(self) -> str:
        """As a SPEC has it."""
        at = f"@{self.speed:g}" if self.speed != 1.0 else ""
        return f"{self.name}:{self.count}{at}" + (f"~{self.memory}GiB" if self.memory else "")


@dataclass(frozen=True)
class Instance:
    """A cluster and what is to be trained on it."""

    islands: tuple[Island, ...]
    link: int  # Gbit/s of Ethernet between islands
    layers: int
    hidden: int
    seq_len: int
    samples: int

    @property
    def spec(self) -> str:
        """As `--emulate` has it."""
        return ",".join(i.spec for i in self.islands) + f";{self.link}GbE"


def instance(seed: int) -> Instance:
    """A random one: two or three islands, some short of memory."""
    draw = random.Random(seed)
    islands = tuple(
        Island(
            draw.choice(NAMES),
            draw.randint(1, 4),
            draw.choice((1.0, 1.0, 0.5, 0.7)),
            draw.choice((None, None, 8, 12, 16, 24)),
        )
        for _ in range(draw.choice((2, 2, 3)))
    )
    layers, hidden = draw.randint(4, 12), draw.choice((1024, 2048, 4096))
    return Instance(
        islands, draw.choice((10, 25, 100)), layers, hidden, draw.choice((1024, 4096)), draw.choice((8, 12, 24, 32))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def planned(what: Instance, folder: Path, *pins: tuple[str, object]) -> Planning | None:
    """None where nothing fits, or pins contradict each other."""
    model = folder / f"{what.layers}-{what.hidden}.json"
    sizes = {"num_hidden_layers": what.layers, "hidden_size": what.hidden, "intermediate_size": 4 * what.hidden}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000}
    rest = {"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
    model.write_text(json.dumps({**sizes, **heads, **rest, "rope_theta": 1e4, "max_position_embeddings": 131072}))
    cluster = describe_cluster(parse_spec(what.spec, CLASSES), CLASSES)
    asked = [("model.name", str(model)), ("model.seq_len", what.seq_len), ("batch.global_batch", what.samples)]
    try:
        return weigh(cluster, load_recipe(None, [*asked, *pins]))
    except HetctlError:
        return None


def seconds(planning: Planning | None) -> float:
    return math.inf if planning is None else planning.predictions[0].seconds


def more(what: Instance, draw: random.Random) -> Instance:
    """The instance with one thing more."""
    index, how = draw.randrange(len(what.islands)), draw.choice(("device", "memory", "speed", "link"))
    if how == "link":
        return replace(what, link=4 * what.link)
    mine = what.islands[index]
    if how == "device":
        richer = replace(mine, count=mine.count + 1)
    elif how == "memory":
        richer = replace(mine, memory=mine.memory and 2 * mine.memory)
    else:
        richer = replace(mine, speed=1.0)
    return replace(what, islands=(*what.islands[:index], richer, *what.islands[index + 1 :]))


def pins(draw: random.Random, samples: int) -> list[tuple[str, object]]:
    """Some wishes at random."""
    wishes: list[tuple[str, object]] = [
        ("parallelism.pipeline", draw.choice((1, 2, 3, 4))),
        ("batch.micro_batch_size", draw.choice([d for d in range(1, 9) if samples % d == 0])),
        ("parallelism.schedule", draw.choice(SCHEDULES)),
        ("parallelism.data", draw.choice((1, 2, 3))),
        ("parallelism.recompute", draw.choice(("none", "selective", "full"))),
        ("parallelism.tensor", draw.choice((1, 2))),
        ("parallelism.activations", draw.choice(("host", "device"))),
    ]
    likely = (0.6, 0.5, 0.6, 0.25, 0.2, 0.2, 0.2)
    return [wish for wish, share in zip(wishes, likely, strict=True) if draw.random() < share]


def own_values(planning: Planning) -> list[tuple[str, object]]:
    """What a plan has, as pins, where pins can say it."""
    replicas = planning.plan.replicas
    found: list[tuple[str, object]] = [
        ("parallelism.schedule", planning.predictions[0].candidate.pipelines[0].schedule)
    ]
    if len({len({s.ranks for s in r.stages}) for r in replicas}) == 1:
        found.append(("parallelism.pipeline", len({s.ranks for s in replicas[0].stages})))
    if len({s.tensor_parallel for r in replicas for s in r.stages}) == 1:
        found.append(("parallelism.tensor", replicas[0].stages[0].tensor_parallel))
    return found


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_more_of_anything_is_never_slower(seed: int, folder: Path) -> None:
    what = instance(seed)
    richer = more(what, random.Random(-seed))
    assert seconds(planned(richer, folder)) <= seconds(planned(what, folder)) * ROUGHLY, (what.spec, richer.spec)


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_nothing_that_can_be_pinned_is_faster(seed: int, folder: Path) -> None:
    what, draw = instance(seed), random.Random(-seed)
    free = planned(what, folder)
    tried = [pins(draw, what.samples) for _ in range(4)]
    for wishes in tried:
        assert seconds(free) <= seconds(planned(what, folder, *wishes)) * 1.01, (what, wishes)
    if free is not None:  # and its own values can be pinned
        own = own_values(free)
        assert seconds(planned(what, folder, *own)) <= seconds(free) * 1.01, (what, own)


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_the_order_of_islands_means_nothing_and_plans_are_the_same_twice(seed: int, folder: Path) -> None:
    what = instance(seed)
    turned = replace(what, islands=what.islands[::-1])
    first, again, other = planned(what, folder), planned(what, folder), planned(turned, folder)
    assert seconds(other) == pytest.approx(seconds(first), rel=1e-6)
    assert (first and first.plan) == (again and again.plan)


@pytest.mark.parametrize("seed", range(INSTANCES))
def test_no_memory_holds_more_than_it_has(seed: int, folder: Path) -> None:
    found = planned(instance(seed), folder)
    for pipeline in found.predictions[0].candidate.pipelines if found else ():
        for use, need in zip(pipeline.stage_uses, pipeline.memory_bytes, strict=True):
            assert need <= usable_bytes(use.pool.rates)
