"""Curves of predictions: how fast a pipeline of two vendors is over its split, and over the link between them."""

from __future__ import annotations

from typing import Any

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.layout import Layout, ReplicaLayout, StageLayout, predict_layout
from hetctl.trainer.planning.problem import read_problem
from hetctl.trainer.recipe import load_recipe

SPLIT_OF = "h200:8,mi325x:8"
RATES = ("1GbE", "10GbE", "25GbE", "100GbE", "200GbE", "400GbE", "800GbE")
MICRO_BATCHES = 32


def over_splits() -> list[dict[str, Any]]:
    """Tokens per second of Llama-8B over the layers on each side."""
    rows = []
    for first in range(10, 24):
        speed = _tokens_per_s(SPLIT_OF, (first, 32 - first), "eager-1f1b")
        rows.append({"split": f"{first}/{32 - first}", "speed: k tokens/s": round(speed / 1e3, 1)})
    return rows


def over_link_rates() -> list[dict[str, Any]]:
    """Tokens per second of Llama-8B, 17/15, over what joins the two hosts, by schedule."""
    rows = []
    for rate in RATES:
        spec = f"h200:1x8/ib400,mi325x:1x8/roce400;{rate}"
        speeds = {f"speed: {s}": round(_tokens_per_s(spec, (17, 15), s) / 1e3, 1) for s in ("eager-1f1b", "1f1b")}
        rows.append({"link": rate, **speeds})
    return rows


def _tokens_per_s(spec: str, layers: tuple[int, int], schedule: str) -> float:
    cluster = describe_cluster(parse_spec(spec, CLASSES), CLASSES)
    settings = {"model.name": "llama-8b", "model.seq_len": 4096, "batch.global_batch": 8 * MICRO_BATCHES}
    recipe = load_recipe(None, list(settings.items()))
    stages = tuple(StageLayout(c, n, width=8) for c, n in zip(("h200", "mi325x"), layers, strict=True))
    problem = read_problem(cluster, recipe)
    found = predict_layout(problem, Layout((ReplicaLayout(stages, 8, MICRO_BATCHES),), schedule))
    return problem.samples * 4096 / found.seconds
