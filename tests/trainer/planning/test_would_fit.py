"""What the error says where no plan fits: devices, samples, a model or a wish with which one would."""

import json
from dataclasses import replace
from pathlib import Path
from time import process_time

import pytest

from hetctl.comm.contract.emulate import Machine, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import Infeasible
from hetctl.trainer.model.config import config_of, find_shape
from hetctl.trainer.planning import would_fit
from hetctl.trainer.planning.changes import more_devices
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.would_fit import Asked, candidates_with
from hetctl.trainer.recipe import load_recipe


def asked(spec: str, model: str, seq_len: int, *sets: tuple[str, object]) -> Asked:
    """A described cluster, and a recipe of 48 samples a step."""
    sizes = [("model.name", model), ("model.seq_len", seq_len), ("batch.global_batch", 48)]
    return Asked.of(
        describe_cluster(parse_spec(spec, CLASSES), CLASSES), load_recipe(None, [*sizes, *sets]), None, None
    )


def refusal(question: Asked) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        make_plan(question.cluster, question.recipe)
    return caught.value


def test_the_fewest_devices_and_the_largest_model_are_named_and_would_do() -> None:
    question = asked("h100:8,a100:8", "gpt-3-175b", 2048)
    start = process_time()
    error = refusal(question)
    refused = process_time() - start
    assert error.hint == (
        "it would fit with 16 more h100 in 2 hosts (24 in all); "
        "the largest known model that fits here is qwen2-72b at 2048 tokens"
    )
    row = CLASSES["h100"]
    start = process_time()
    make_plan(more_devices(question.cluster, row, 16, per_host=8).cluster, question.recipe)
    assert refused < 5 * (process_time() - start)  # a third of it on a quiet core
    fewer = more_devices(question.cluster, row, 8, per_host=8).cluster
    assert not candidates_with(question.problem(fewer, 0.5), 0)
    make_plan(question.cluster, question.of_model("qwen2-72b", 2048).recipe)


def test_shorter_samples_are_named_where_they_would_do(tmp_path: Path) -> None:
    shape = replace(find_shape("llama-1b"), max_seq_len=131072)
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape, dtype="bfloat16")))
    question = asked("l4:1", str(tmp_path), 131072)
    hint = refusal(question).hint
    assert "with model.seq_len=" in hint
    longest = int(hint.split("model.seq_len=")[1].split(";")[0])
    make_plan(question.cluster, question.of_model(str(tmp_path), longest).recipe)
    refusal(question.of_model(str(tmp_path), 2 * longest))


def test_moments_in_8_bits_are_named_where_they_would_do() -> None:
    question, small = asked("h100:1", "llama-8b", 4096), ("optimizer.name", "adamw_8bit")
    assert refusal(question).hint.startswith("it would fit with optimizer.name=adamw_8bit or with 1 more h100")
    make_plan(question.cluster, asked("h100:1", "llama-8b", 4096, small).recipe)
    assert small[1] not in refusal(asked("l4:1", "llama-8b", 4096, small)).hint


@pytest.mark.parametrize(
    "pin", [("parallelism.optimizer_state", "device"), ("parallelism.data", 2), ("batch.micro_batch_size", 24)]
)
def test_a_wish_without_which_it_fits_is_named_and_nothing_else(pin: tuple[str, object]) -> None:
    question = asked("rtx4090:2", "llama-3b", 8192, pin)
    error = refusal(question)
    assert f"does not fit with {pin[0]}={pin[1]}: " in error.message
    assert "everything that saves memory" not in error.message
    assert error.hint == f"leave out or change {pin[0]}"


def test_an_emulation_is_not_told_to_buy_devices() -> None:
    spec, machine = parse_spec("h200:1,mi325x:1", CLASSES), Machine("here", "gloo", (2**32, 2**32))
    question = replace(asked("h200:1", "llama-8b", 4096), cluster=label_machine(spec, machine))
    assert refusal(question).hint.startswith("the largest known model that fits here is ")


def test_a_cluster_of_many_devices_is_not_planned_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(would_fit, "MOST_ASKED", 1)
    assert refusal(asked("l4:2", "llama-70b", 4096)).hint == (
        "more devices or memory, a smaller model, or shorter samples"
    )
