"""`hetctl estimate`: its figures are those of `hetctl plan`, what it says will do does, and less does not."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError, Infeasible
from hetctl.commands.estimate import estimate
from hetctl.commands.options import RunOptions
from hetctl.commands.plan import plan
from hetctl.trainer.model.config import config_of, find_shape
from hetctl.trainer.model.tensor_cuts import adapter_parameters
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.problem import read_problem
from hetctl.trainer.planning.search import Search
from hetctl.trainer.recipe import Recipe, load_recipe

ESTIMATE, PLAN = estimate.__wrapped__, plan.__wrapped__  # type: ignore[attr-defined]  # with their options together


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_figures_of_devices_are_those_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    spec, link = "rtx4090:1,rx7900xtx:1", ["rtx4090-rx7900xtx=10GbE"]
    options = RunOptions(link=link, seq_len=1024, global_batch=16, settings=["parallelism.activations=device"])
    ESTIMATE(options, "llama-1b", spec, lora=8, as_json=True)
    weights, eight, adapters, few = said(capsys)["ways"]
    asked = ((weights, None, "none"), (eight, None, "none"), (adapters, 8, "none"), (few, 8, "nf4"))
    for way, rank, kind in asked:
        settings = [*options.settings, f"optimizer.name={way['optimizer']}"]
        own = replace(options, model="llama-1b", emulate=spec, lora=rank, quantize=kind, settings=settings)
        PLAN(own, as_json=True)
        planned = said(capsys)
        assert (way["lora_rank"], way["quantize"]) == (rank, kind)
        assert way["plan"] == planned
        held = {r["device_class"]: planned["predicted"]["memory_bytes"][r["rank"]] for r in planned["ranks"]}
        assert {part["device_class"]: part["memory_bytes"] for part in way["parts"]} == held
        assert [part["device_memory_bytes"] for part in way["parts"]] == [24 * 2**30] * 2
    assert weights["plan"]["predicted"]["tokens_per_s"] < adapters["plan"]["predicted"]["tokens_per_s"]
    assert "TCP over rtx4090-rx7900xtx" in weights["plan"]["bridges"][0]["reason"]


def recipe_of(model: str, seq_len: int, rank: int | None, devices: int, kind: str = "none", **wishes: str) -> Recipe:
    sizes = [("model.name", model), ("model.seq_len", seq_len), ("batch.global_batch", 24 * devices)]
    pins = [(f"parallelism.{key}", value) for key, value in wishes.items()]
    return load_recipe(None, [*sizes, *pins, *([("lora.rank", rank)] if rank else []), ("lora.quantize", kind)])


def fits(device_class: str, count: int, recipe: Recipe) -> bool:
    cluster = describe_cluster(parse_spec(f"{device_class}:{count}", CLASSES), CLASSES)
    return bool(Search(read_problem(cluster, recipe), keep=1).run().candidates)


def test_the_smallest_devices_will_do_and_smaller_ones_will_not(capsys: pytest.CaptureFixture[str]) -> None:
    ESTIMATE(RunOptions(seq_len=2048), "llama-3b", as_json=True)
    sizes = sorted({row.memory_bytes for row in CLASSES.values() if row.vendor != "cpu"})
    smaller = {size: next(r.name for r in CLASSES.values() if r.memory_bytes == less) for less, size in pairwise(sizes)}
    for way in said(capsys)["ways"]:
        assert [enough["devices"] for enough in way["smallest"]] == sorted({e["devices"] for e in way["smallest"]})
        for enough in way["smallest"]:
            count = enough["devices"]
            for size, pins in (
                (enough["alone"], {"optimizer_state": "device", "activations": "device"}),
                (enough["with_host"], {}),
            ):
                recipe = recipe_of("llama-3b", 2048, way["lora_rank"], count, way["quantize"], **pins)
                recipe = replace(recipe, optimizer=replace(recipe.optimizer, name=way["optimizer"]))
                assert fits(size["classes"][0], count, recipe), (way["name"], count, size)
                below = smaller.get(size["memory_bytes"])
                assert below is None or not fits(below, count, recipe), (way["name"], count, below)


def test_one_device_holds_what_the_formulas_say(capsys: pytest.CaptureFixture[str]) -> None:
    ESTIMATE(RunOptions(seq_len=2048), "llama-1b", lora=4, as_json=True)
    weights, eight, adapters, few = (way["one_device"] for way in said(capsys)["ways"])
    n = find_shape("llama-1b").parameters
    shape = recipe_of("llama-1b", 2048, 4, 1).shape()
    more = shape.layers * adapter_parameters(shape)
    assert (weights["weights_bytes"], weights["gradients_bytes"], weights["optimiser_bytes"]) == (2 * n, 4 * n, 12 * n)
    assert (eight["weights_bytes"], eight["gradients_bytes"]) == (2 * n, 4 * n)
    assert eight["optimiser_bytes"] == pytest.approx((4 + 2 + 8 / 256) * n)  # a factor for 256 values of each moment
    assert adapters["weights_bytes"] == 2 * (n + more)
    assert adapters["optimiser_bytes"] == 12 * more
    assert adapters["gradients_bytes"] == few["gradients_bytes"] == 4 * more
    quantised = shape.layers * (shape.attention_parameters + shape.mlp_parameters)
    assert adapters["weights_bytes"] - few["weights_bytes"] == quantised * (2 - 4.5 / 8)
    for memory in (weights, adapters):
        assert memory["total_bytes"] == sum(size for key, size in memory.items() if key != "total_bytes")
        assert memory["activations_bytes"] > 16 * 2048 * 2048 * 2


def test_a_config_is_a_model_and_an_unknown_name_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(find_shape("llama-160m"), dtype="bfloat16")))
    ESTIMATE(RunOptions(seq_len=512), str(tmp_path), as_json=True)
    assert said(capsys)["parameters"] == find_shape("llama-160m").parameters
    with pytest.raises(ConfigError, match="neither a model hetctl knows nor a config"):
        ESTIMATE(RunOptions(), "llama-9b")
    with pytest.raises(ConfigError, match="--link joins islands"):
        ESTIMATE(RunOptions(link=["a-b=10GbE"]), "llama-1b")


def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    ESTIMATE(RunOptions(seq_len=2048, global_batch=24), "llama-8b", "rtx4090:1")
    shown = capsys.readouterr().out
    assert "all weights: 'llama-8b' does not fit" in shown
    assert "it would fit with" in shown
    assert "predicted from the hardware table" in shown
    assert "in bf16" in shown
    with pytest.raises(Infeasible) as caught:
        ESTIMATE(RunOptions(seq_len=2048, global_batch=24), "llama-70b", "rtx4090:1", as_json=True)
    document = said(capsys)
    assert (caught.value.exit_code, caught.value.documented) == (5, True)
    assert document["exit_code"] == 5
    assert [way["fits"] for way in document["ways"]] == [False] * 4
    assert all("it would fit with" in way["hint"] for way in document["ways"])


def test_what_cannot_be_trained_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    ESTIMATE(RunOptions(seq_len=512), "gpt-1.7b", "h100:1")
    assert "can be planned, not trained" in capsys.readouterr().err
