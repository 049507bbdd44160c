"""Options mean the same to every command: what `plan` sized `train` takes, and all may emulate a cluster file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetctl.comm.contract.cluster import save_cluster
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import save_plan
from hetctl.commands.options import RunOptions
from hetctl.commands.resolve import Resolved, resolve
from hetctl.console import Sink
from hetctl.runs.prepare import prepare
from hetctl.trainer.model.config import config_of, find_shape
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe

SPEC = "cpu:1,cpu:1"


def planned(folder: Path, options: RunOptions) -> tuple[Path, Resolved]:
    """What `hetctl plan -o plan.yaml` writes with these options."""
    found = resolve(options, Sink(), runs=False)
    save_plan(folder / "plan.yaml", make_plan(found.cluster, found.recipe))
    return folder / "plan.yaml", found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_of_a_named_model_is_taken_by_train_with_the_same_words(tmp_path: Path) -> None:
    file, made = planned(tmp_path, RunOptions(model="llama-160m", emulate=SPEC))
    found = resolve(RunOptions(model="llama-160m", plan=file), Sink(), runs=True)
    assert (found.recipe.model.seq_len, found.recipe.batch.global_batch) == (
        made.recipe.model.seq_len,
        made.recipe.batch.global_batch,
    )
    text = tmp_path / "text"
    text.write_text("what a text says. " * 60_000)
    found = resolve(RunOptions(model="llama-160m", plan=file, settings=[f"data.source={text}"]), Sink(), runs=True)
    prepared = prepare(found.recipe, found.cluster, plan=found.plan, speeds=found.speeds, way="local", sink=Sink())
    assert prepared.plan.global_batch == made.recipe.batch.global_batch


def test_plan_and_train_assume_the_same_sizes_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = RunOptions(model="llama-160m", emulate=SPEC)
    sizes = [resolve(options, Sink(), runs=runs).recipe for runs in (False, True)]
    assert sizes[0] == sizes[1]
    said = capsys.readouterr().err
    assert said.count("no --seq-len given: 2048 tokens per sample") == 2
    assert said.count("no --global-batch given: 48 samples per step") == 2


def test_a_recipe_file_that_leaves_out_sizes_has_those_of_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the demo's 16 samples of 128 tokens; what the file does say stays."""
    (tmp_path / "recipe.yaml").write_text("model: {name: llama-160m}\nbatch: {global_batch: 8}\n")
    made = resolve(RunOptions(recipe=tmp_path / "recipe.yaml", emulate=SPEC), Sink(), runs=False).recipe
    assert (made.model.seq_len, made.batch.global_batch) == (2048, 8)
    said = capsys.readouterr().err
    assert "no --seq-len given: 2048" in said
    assert "--global-batch" not in said


def test_the_learning_rate_follows_the_model_and_is_said_where_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ["data.source=python-stdlib"]
    options = RunOptions(model="llama-160m", emulate=SPEC, settings=text)
    assert resolve(options, Sink(), runs=False).recipe.optimizer.lr == 6e-4
    assert "optimizer.lr" not in capsys.readouterr().err
    assert resolve(options, Sink(), runs=True, trains=True).recipe.optimizer.lr == 6e-4
    assert "no optimizer.lr given: 0.0006, usual for a model of this size" in capsys.readouterr().err
    given = RunOptions(model="llama-160m", emulate=SPEC, settings=[*text, "optimizer.lr=0.1"])
    assert resolve(given, Sink(), runs=True, trains=True).recipe.optimizer.lr == 0.1
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(find_shape("demo"), dtype="float32")))
    (folder / "model.safetensors").touch()
    tuned = RunOptions(model=str(folder), emulate=SPEC, settings=text)
    assert resolve(tuned, Sink(), runs=True, trains=True).recipe.optimizer.lr == 2e-5
    assert resolve(RunOptions(emulate=SPEC), Sink(), runs=True, trains=True).recipe == load_recipe(None)


def test_a_real_model_is_trained_on_what_somebody_names(tmp_path: Path) -> None:
    options = RunOptions(model="llama-160m", emulate=SPEC)
    with pytest.raises(ConfigError, match="nothing says what to train llama-160m on") as caught:
        resolve(options, Sink(), runs=True, trains=True)
    assert "--data PATH" in caught.value.hint
    assert "--data python-stdlib" in caught.value.hint
    assert resolve(options, Sink(), runs=False).recipe.model.name == "llama-160m"  # planning needs none
    (tmp_path / "recipe.yaml").write_text("model: {name: llama-160m}\ndata: {source: python-stdlib}\n")
    resolve(RunOptions(recipe=tmp_path / "recipe.yaml", emulate=SPEC), Sink(), runs=True, trains=True)


def test_sizes_that_a_person_gave_are_not_the_plans(tmp_path: Path) -> None:
    file, _ = planned(tmp_path, RunOptions(model="llama-160m", emulate=SPEC))
    found = resolve(RunOptions(model="llama-160m", plan=file, seq_len=256), Sink(), runs=True)
    with pytest.raises(ConfigError, match="the recipe asks for"):
        prepare(found.recipe, found.cluster, plan=found.plan, speeds=found.speeds, way="local", sink=Sink())


def test_a_cluster_file_may_be_emulated_by_plan_and_by_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = describe_cluster(parse_spec("h200:2@0.5,mi325x:1~64GiB", CLASSES), CLASSES)
    save_cluster(tmp_path / "there.yaml", described)
    options = RunOptions(emulate=str(tmp_path / "there.yaml"))
    assert resolve(options, Sink(), runs=False).cluster == described
    here = resolve(options, Sink(), runs=True).cluster
    assert here.source == "emulated"
    assert here.runs is not None
    assert [(i.vendor, len(i.members)) for i in here.islands] == [(i.vendor, len(i.members)) for i in described.islands]
    devices = [here.device(member) for island in here.islands for member in island.members]
    assert [(d.device_class, d.speed) for d in devices] == [("h200", 0.5), ("h200", 0.5), ("mi325x", 1.0)]
    assert "there.yaml" in capsys.readouterr().out


def test_where_is_said_once() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        resolve(RunOptions(cluster=Path("a.yaml"), emulate=SPEC), Sink(), runs=True)
    with pytest.raises(ConfigError, match="--plan already says where"):
        resolve(RunOptions(plan=Path("a.yaml"), emulate=SPEC), Sink(), runs=True)
