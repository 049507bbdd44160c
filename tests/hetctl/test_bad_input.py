"""Bad input: the documented exit code, one sentence with a hint, and nothing written."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import SafetensorError
from typer.testing import CliRunner

from hetctl.app import app, main
from hetctl.comm.contract.errors import ConfigError, HetctlError, WorkFailed
from hetctl.comm.contract.files import write_json
from hetctl.comm.contract.plan import Predicted, save_plan
from hetctl.comm.contract.values import encode
from hetctl.runs.summary import NEEDED
from hetctl.trainer.checkpoint.reader import Reader
from hetctl.trainer.job import Job
from hetctl.trainer.model import huggingface
from hetctl.trainer.model.config import config_of
from hetctl.trainer.model.huggingface import write_model
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.recipe import Recipe, load_recipe, parse_override
from tests.layouts import Cut, Layout, Pipe, plan_of

TWO_EACH = Layout(((0, 1), (2, 3)), (Pipe((Cut((0, 4), (0, 1)), Cut((4, 8), (2, 3))), 4, 4),))


def outcome(*argv: str) -> HetctlError:
    result = CliRunner().invoke(app, list(argv))
    assert isinstance(result.exception, HetctlError), (result.output, result.exception)
    return result.exception


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "words", "hint"),
    [
        ("h2oo:2,mi325x:2", "'h2oo' is not a device class", "'h200'"),
        ("h200:0,mi325x:2", "count of at least 1", "CLASS:COUNT"),
        ("h200:2@0,mi325x:2", "(0, 1]", "@0.6"),
        ("h200:2@1.5,mi325x:2", "(0, 1]", "@0.6"),
        ("h200:2@fast,mi325x:2", "(0, 1]", "@0.6"),
        ("h200:2,", "not a class and a count", "CLASS:COUNT"),
        ("h200:2+mi325x:2", "into one island", "','"),
        ("h200:2~40XB", "not a size", "40GiB"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_bad_spec(empty: Path, command: str, spec: str, words: str, hint: str) -> None:
    error = outcome(command, "--emulate", spec)
    assert error.exit_code == 2
    assert words in error.message
    assert hint in error.hint
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "words", "hint"),
    [
        ("optimizer.learning_rate=1", "unknown key 'learning_rate'", ""),
        ("optimiser.lr=1", "unknown key 'optimiser'", "'optimizer'"),
        ("train.stepz=3", "unknown key 'stepz'", "'steps'"),
        ("train.steps=0", "at least 1", ""),
        ("train.profile_step=900", "train.profile_step", ""),
        ("train.steps=many", "expected a whole number", ""),
        ("train.steps", "not key=value", "--set"),
        ("data.source=/nowhere/at/all", "does not exist", "data.source"),
        ("model.name=lama-8b", "neither a model", "'llama-8b'"),
        ("model.seq_len=100000", "longer than", "seq_len"),
        ("data.tokenizer=/nowhere/tokenizer.json", "no tokenizer", ""),
    ],
)
def test_a_bad_setting(empty: Path, setting: str, words: str, hint: str) -> None:
    error = outcome("train", "--emulate", "h200:1,mi325x:1", "--set", setting)
    assert error.exit_code == 2
    assert words in error.message
    assert hint in error.hint
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.profile_step=0", "in [1, 160] (train.steps), found 0"),
        ("train.profile_step=161", "in [1, 160] (train.steps), found 161"),
        ("train.timeout_s=0", "in (0, 1e+07], found 0.0"),
        ("train.timeout_s=inf", "in (0, 1e+07], found inf"),
        ("model.seq_len=0", "at least 1, found 0"),
        ("batch.global_batch=1000000000000", "at most 100,000,000, found 1000000000000"),
        ("batch.global_batch=-4", "at least 1, found -4"),
        ("batch.micro_batch_size=0", "at least 1, found 0"),
        ("checkpoint.every=-1", "at least 0, found -1"),
        ("checkpoint.keep=0", "at least 1, found 0"),
        ("data.seed=-1", "at least 0, found -1"),
        ("data.validation_share=0", "in (0, 1), found 0.0"),
        ("optimizer.lr=0", "in (0, 1e+30], found 0.0"),
        ("optimizer.lr=inf", "in (0, 1e+30], found inf"),
        ("optimizer.lr=1e300", "in (0, 1e+30], found 1e+300"),
        ("train.seed=18446744073709551616", f"in [{-(2**63)}, {2**64 - 1}], found {2**64}"),
        (f"train.seed={-(2**63) - 1}", f"in [{-(2**63)}, {2**64 - 1}], found {-(2**63) - 1}"),
        ("optimizer.eps=0", "finite and positive, found 0.0"),
        ("optimizer.beta1=1", "in [0, 1), found 1.0"),
        ("optimizer.beta2=-0.1", "in [0, 1), found -0.1"),
        ("optimizer.clip_norm=-1", "finite and at least 0, found -1.0"),
        ("optimizer.weight_decay=-0.1", "finite and at least 0, found -0.1"),
        ("optimizer.warmup_steps=-1", "at least 0, found -1"),
        ("optimizer.min_lr_share=1.5", "in [0, 1], found 1.5"),
        ("parallelism.alpha=-1", "finite and positive, found -1.0"),
    ],
)
def test_a_number_out_of_its_range(setting: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(None, [parse_override(setting)])
    assert caught.value.message == f"{setting.partition('=')[0]} must be {words}"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optimizer.lr=nan", r"recipe\.optimizer\.lr: not a number \(nan\)"),
        (f"optimizer.lr=1{'0' * 309}", r"recipe\.optimizer\.lr: 10{56}\.\.\. is too large a number"),
        (f"train.steps=1{'0' * 5000}", "not plain YAML"),
        ("train.steps=2026-13-01", "not plain YAML"),
        *(
            (f"{key}={path}", f"^{key} cannot be used as a path: {why}, found '.{{1,60}}$")
            for key in ("model.name", "data.source", "data.tokenizer")
            for path, why in (('"\\0"', "embedded null byte"), ("x" * 5000, "File name too long"))
        ),
    ],
)
def test_a_value_that_is_too_long_or_no_path(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_recipe(None, [parse_override(setting)])


@pytest.mark.parametrize("value", ["1" * 5000, "2026-13-01"])
def test_a_recipe_of_values_that_yaml_cannot_make(value: str, empty: Path) -> None:
    (empty / "recipe.yaml").write_text(f"train: {{steps: {value}}}")
    with pytest.raises(ConfigError, match=r"recipe\.yaml is not the plain YAML"):
        load_recipe(empty / "recipe.yaml")


def test_numbers_at_the_edge_of_their_range() -> None:
    edge = ("checkpoint.every=0", "optimizer.clip_norm=0", "optimizer.weight_decay=0", "optimizer.warmup_steps=0")
    settings = (*edge, "optimizer.beta1=0", "train.profile_step=160", "train.steps=160", "optimizer.min_lr_share=1")
    assert load_recipe(None, [parse_override(s) for s in settings]).train.profile_step == 160


def test_an_empty_data_path(empty: Path) -> None:
    (empty / "data").mkdir()
    assert outcome("train", "--set", f"data.source={empty}/data").exit_code == 2
    (empty / "data" / "a.txt").write_text("")
    error = outcome("train", "--set", f"data.source={empty}/data/a.txt")
    assert error.exit_code == 2
    assert "is empty" in error.message
    (empty / "data" / "a.txt").write_text("too short")
    error = outcome("train", "--set", f"data.source={empty}/data/a.txt")
    assert "too few" in error.message
    assert not (empty / "runs").exists()


def test_a_jsonl_without_the_key(empty: Path) -> None:
    (empty / "a.jsonl").write_text('{"text": "fine"}\n{"body": "not here"}\n')
    error = outcome("train", "--set", "data.source=a.jsonl")
    assert error.exit_code == 2
    assert "line 2" in error.message


def test_a_yaml_that_tries_to_run_code(empty: Path) -> None:
    (empty / "recipe.yaml").write_text("train: !!python/object/apply:os.system ['touch hacked']\n")
    error = outcome("train", "recipe.yaml")
    assert error.exit_code == 2
    assert "line 1" in error.message
    assert not (empty / "hacked").exists()


def test_more_stages_than_layers(empty: Path) -> None:
    error = outcome("train", "--emulate", "h200:5,mi325x:5", "--set", "parallelism.pipeline=9")
    assert error.exit_code in (2, 5)
    assert "layer" in error.message


@pytest.mark.parametrize(
    "settings",
    [
        ("parallelism.data=6", "batch.global_batch=5"),  # fewer samples than replicas
        ("batch.micro_batch_size=2", "batch.global_batch=5"),
        ("parallelism.tensor=4", "parallelism.pipeline=3", "batch.global_batch=5"),  # more devices than there are
        ("parallelism.schedule=interleaved", "parallelism.pipeline=2", "batch.global_batch=5"),
        ("batch.micro_batch_size=1", "batch.global_batch=50000"),  # more micro-batches than are simulated
        ("parallelism.split=holmes", "parallelism.alpha=1e308", "batch.global_batch=5"),
    ],
)
def test_a_batch_that_no_split_can_serve(empty: Path, settings: tuple[str, ...]) -> None:
    flags = [part for setting in settings for part in ("--set", setting)]
    error = outcome("train", "--emulate", "h200:2,mi325x:2", *flags)
    assert error.exit_code == 5
    assert "5" in error.message or "interleaved" in error.message
    assert error.hint
    assert list(empty.iterdir()) == []


def test_a_tokenizer_with_more_words_than_the_model(empty: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{k}": k for k in range(400)} | {"<|endoftext|>": 400}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(empty / "tokenizer.json"))
    error = outcome("train", "--set", "data.tokenizer=tokenizer.json")
    assert error.exit_code == 2
    assert "tokens go up to 400" in error.message
    assert "only to 256" in error.message
    assert sorted(p.name for p in empty.iterdir()) == ["tokenizer.json"]


def test_a_tokenizer_of_few_words_with_large_ids(empty: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"w{k}": 11 * k for k in range(200)} | {"</s>": 1}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(empty / "tokenizer.json"))
    error = outcome("train", "--set", "data.tokenizer=tokenizer.json")
    assert error.exit_code == 2
    assert "tokens go up to 2189" in error.message
    assert sorted(p.name for p in empty.iterdir()) == ["tokenizer.json"]


def write_demo(folder: Path, *, without: str = "") -> None:
    """The demo's model as a Hugging Face folder, with a tensor left out."""
    shape = SHAPES["demo"]
    tensors = {n: p.detach() for n, p in StageModel(shape, (0, shape.layers)).named().items() if n != without}
    write_model(folder, config_of(shape, dtype="float32"), tensors, tensors.__getitem__, dtype=torch.float32)


def test_weights_that_lack_a_tensor(empty: Path) -> None:
    write_demo(empty / "model", without="model.norm.weight")
    error = outcome("train", "--model", str(empty / "model"), "--set", "data.source=python-stdlib")
    assert error.exit_code == 2
    assert "model.safetensors has no 'model.norm.weight'" in error.message
    assert "config.json" in error.hint
    assert sorted(p.name for p in empty.iterdir()) == ["model"]


def test_weights_that_were_cut_short(empty: Path) -> None:
    write_demo(empty / "model")
    file = empty / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    error = outcome("train", "--model", str(empty / "model"), "--set", "data.source=python-stdlib")
    assert error.exit_code == 2
    assert "damaged or cut short" in error.message
    assert sorted(p.name for p in empty.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("file", "words", "hint"),
    [
        ("pytorch_model.bin", "holds its weights as pytorch_model.bin", "save_pretrained"),
        ("model.gguf", "holds its weights as model.gguf", "safetensors"),
        ("consolidated.00.pth", "holds its weights as consolidated.00.pth", "config.json"),
        ("model-00001-of-00002.safetensors", "neither model.safetensors nor", "fetch the folder anew"),
    ],
)
def test_weights_that_would_not_be_read(empty: Path, file: str, words: str, hint: str) -> None:
    write_demo(empty / "model")
    (empty / "model" / "model.safetensors").rename(empty / "model" / file)
    error = outcome("train", "--model", str(empty / "model"), "--set", "data.source=python-stdlib")
    assert error.exit_code == 2
    assert words in error.message
    assert hint in error.hint
    assert sorted(p.name for p in empty.iterdir()) == ["model"]


@pytest.mark.parametrize(
    ("name", "said"), [("model", "/model: they start random"), ("model/config.json", ""), ("demo", "")]
)
def test_a_folder_without_weights_starts_random_and_says_so(empty: Path, name: str, said: str) -> None:
    write_demo(empty / "model")
    (empty / "model" / "model.safetensors").unlink()
    (empty / "demo").mkdir()
    (empty / "demo" / "corpus.bin").touch()  # a known name means the known model, whatever lies here
    result = CliRunner().invoke(
        app, ["train", "--model", name, "--set", "data.source=python-stdlib", "--resume", "nowhere"]
    )
    assert "is not a checkpoint" in str(result.exception)  # all that was wrong
    assert ("start random" in result.output) == bool(said)
    assert said in result.output


def both_tensor(plan: dict[str, Any]) -> None:
    for stage in plan["replicas"][0]["stages"]:
        stage.update(tensor_parallel=2)


def predicted(**edits: Any) -> dict[str, Any]:
    return {**encode(Predicted("table", 1.0, 512.0, 0.0, 0.0, None, (9, 9, 9, 9))), **edits}


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda p: p["replicas"][0]["stages"][1].update(layers=[5, 8]), "expected 4"),
        (lambda p: p["replicas"][0]["stages"][1].update(layers=[4, 7]), "the model has 8"),
        (lambda p: p["replicas"][0]["stages"][0].update(ranks=[0]), "rank 1"),
        (lambda p: p["ranks"].pop(), "rank 3"),
        (lambda p: p["islands"][0].update(ranks=[0]), "rank 1"),
        (lambda p: p["replicas"][0]["stages"][0].update(micro_batches=3), "samples"),
        (lambda p: p.update(schedul="1f1b"), "unknown key 'schedul'"),
        (lambda p: p.update(schedule="zerobubble"), "schedule 'zerobubble'"),
        (lambda p: p["replicas"][0]["stages"][0].update(tensor_parallel=3), "do not divide by tensor_parallel 3"),
        (lambda p: p["ranks"][1].update(host="elsewhere") or both_tensor(p), "is on 2 hosts"),
        (lambda p: p.update(schema_version=9), "schema_version"),
        (lambda p: p.update(forwards_ahead=[1, 2]), "[1, 2] grows along the stages"),
        (lambda p: p["replicas"][0].update(forwards_ahead=[2, 3]), "[2, 3] grows along the stages"),
        (lambda p: p["replicas"][0].update(forwards_ahead=[2, 1, 1]), "[2, 1, 1] must name each stage's"),
        (lambda p: p.update(forwards_ahead=[2, 1, 1]), "[2, 1, 1] must name each stage's"),
        (lambda p: p.update(forwards_ahead=[]), "[] must name each stage's"),
        (lambda p: p.update(forwards_ahead=[2, 0]), "[2, 0] must name each stage's"),
        (lambda p: p["replicas"][0]["stages"][1].update(shards=-1), "shards must be at least 1, found -1"),
        (lambda p: p["replicas"][0]["stages"][1].update(shards=0), "shards must be at least 1, found 0"),
        (lambda p: p["ranks"][2].update(speed=-0.5), "speed of rank 2 must be finite and positive, found -0.5"),
        (lambda p: p["ranks"][2].update(speed=float("nan")), "plan.yaml.ranks[2].speed: not a number (nan)"),
        (lambda p: p.update(predicted=predicted(memory_bytes=[9, 9])), "memory_bytes has 2 entries for 4 ranks"),
        (lambda p: [g.update(backend="gloo") for g in p["groups"]], "crosses islands"),
    ],
)
def test_a_plan_edited_wrongly(empty: Path, edit: Any, words: str) -> None:
    plan = encode(plan_of(TWO_EACH, seq_len=Recipe().model.seq_len))
    edit(plan)
    (empty / "plan.yaml").write_text(yaml.safe_dump(plan))
    error = outcome("train", "--plan", "plan.yaml")
    assert error.exit_code == 2
    assert words in error.message
    assert sorted(p.name for p in empty.iterdir()) == ["plan.yaml"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--split", "uniform"), "parallelism.split would change nothing"),
        (("--speed", "h200=500"), "--speed would change nothing"),
        (("--set", "parallelism.order=given"), "parallelism.order would change nothing"),
        (("--bridge", "shm"), "the plan was made with bridge.transport tcp, the recipe asks for shm"),
        (("--set", "parallelism.data=3"), "the plan was made with parallelism.data 1, the recipe asks for 3"),
    ],
)
def test_what_stands_beside_a_plan_is_used_or_refused(empty: Path, words: tuple[str, ...], named: str) -> None:
    (empty / "plan.yaml").write_text(yaml.safe_dump(encode(plan_of(TWO_EACH, seq_len=Recipe().model.seq_len))))
    error = outcome("train", "--plan", "plan.yaml", *words)
    assert error.exit_code == 2
    assert named in error.message


def test_forwards_that_grow_only_beyond_the_micro_batches_are_no_more_of_them(empty: Path) -> None:
    plan = plan_of(replace(TWO_EACH, ahead=(4, 9)), seq_len=Recipe().model.seq_len)
    plan.validate(where="plan")  # GPipe: there are four micro-batches


@pytest.mark.parametrize("ahead", ["[1,2]", "[0,0]", "[-1,2]", "[2,0]", "[3,1,2]", "[]"])
def test_forwards_ahead_that_no_pipeline_could_run(ahead: str) -> None:
    with pytest.raises(ConfigError, match=r"forwards_ahead must name at least 1 for each stage") as caught:
        load_recipe(None, [parse_override(f"parallelism.forwards_ahead={ahead}")])
    assert "for example [2, 1]" in caught.value.hint


@pytest.mark.parametrize("settings", [("parallelism.pipeline=2",), ("parallelism.layers=[2,6]",)])
def test_forwards_ahead_of_another_number_of_stages(empty: Path, settings: tuple[str, ...]) -> None:
    flags = [part for setting in (*settings, "parallelism.forwards_ahead=[1]") for part in ("--set", setting)]
    error = outcome("plan", "--model", "demo", "--emulate", "h200:1,mi325x:1", *flags)
    assert error.exit_code == 2
    assert "forwards_ahead names 1 stages, there are 2" in error.message


def test_forwards_ahead_alone_says_how_many_stages(empty: Path) -> None:
    words = [
        "plan",
        "--model",
        "demo",
        "--emulate",
        "h200:2,mi325x:2",
        "--set",
        "parallelism.forwards_ahead=[2,2]",
        "--json",
    ]
    plan = json.loads(CliRunner().invoke(app, words).stdout)
    assert {len(r["stages"]) for r in plan["replicas"]} == {2}
    assert plan["forwards_ahead"] == [2, 2]


def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> dict[str, Any]:
    """The document that `--json` prints of a failure."""
    monkeypatch.setattr(sys, "argv", ["hetctl", *argv, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert ended.value.code == said["exit_code"]
    return said


@pytest.mark.parametrize("option", ["-o", "--html", "--trace"])
def test_a_folder_where_a_file_is_to_be_written(
    empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    (empty / "there").mkdir()
    said = told(
        capsys, monkeypatch, "plan", "--model", "demo", "--emulate", "h200:1,mi325x:1", option, f"{empty}/there"
    )
    assert said["error"] == f"cannot read or write {empty}/there: Is a directory"
    assert said["exit_code"] == 1
    assert "name a file" in said["hint"]
    assert [p.name for p in empty.iterdir()] == ["there"]


def test_a_disk_without_room(empty: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # names no file

    monkeypatch.setattr(os, "fsync", full)
    said = told(
        capsys, monkeypatch, "plan", "--model", "demo", "--emulate", "h200:1,mi325x:1", "-o", f"{empty}/plan.yaml"
    )
    assert said["error"] == f"cannot read or write {empty}/plan.yaml: No space left on device"
    assert "make room" in said["hint"]
    assert list(empty.iterdir()) == []


def test_an_export_that_the_disk_has_no_room_for(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Any, path: str, **__: Any) -> None:
        Path(path).write_bytes(b"a part")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(huggingface, "save_file", full)
    with pytest.raises(WorkFailed, match=r"model cannot be written to .*: .*No space left") as caught:
        write_demo(empty / "out")
    assert caught.value.exit_code == 1
    assert list((empty / "out").iterdir()) == []


def test_an_export_that_breaks_off_leaves_no_part(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: Any) -> Any:
        yield {"a": torch.zeros(2)}
        raise ConfigError("a shard does not match its hash")

    monkeypatch.setattr(huggingface, "_by_size", damaged)
    with pytest.raises(ConfigError, match="does not match"):
        write_demo(empty / "out")
    assert list((empty / "out").iterdir()) == []


def test_an_export_to_a_file(empty: Path) -> None:
    (empty / "launch").mkdir()
    write_json(empty / "launch" / "job.json", encode(Job(plan_of(TWO_EACH, seq_len=8), Recipe(), SHAPES["demo"], "")))
    write_json(empty / "checkpoints" / "step-1" / "manifest.json", {})
    (empty / "out").touch()
    error = outcome("export", ".", "--to", "out")
    assert error.exit_code == 2
    assert "'out' is not a folder" in error.message


WHOLE_SUMMARY = dict.fromkeys(NEEDED) | {"run": "a", "status": "done", "model": "demo", "run_dir": ".", "steps": 1}
WHOLE_SUMMARY |= {"tokens": 8, "islands": []}


@pytest.mark.parametrize(
    ("file", "holds", "words"),
    [
        ("summary.json", [], "summary.json is damaged: summary.json: expected keys and values"),
        ("summary.json", {}, "summary.json is damaged: it lacks 'run'"),
        ("summary.json", {"run": "a"}, "summary.json is damaged: it lacks 'status'"),
        ("launch/timeline.json", {"a": 1}, "timeline.json is damaged"),
        ("launch/timeline.json", [1], "timeline.json is damaged"),
    ],
)
def test_a_report_of_a_damaged_run(empty: Path, file: str, holds: Any, words: str) -> None:
    save_plan(empty / "plan.yaml", plan_of(TWO_EACH, seq_len=8))
    write_json(empty / "summary.json", WHOLE_SUMMARY)
    (empty / "launch").mkdir()
    write_json(empty / file, holds)
    error = outcome("report", ".")
    assert error.exit_code == 2
    assert words in error.message
    assert "move the file away" in error.hint
    assert not (empty / "report.html").exists()


WHOLE = {"format": 3, "step": 1, "updates": 1, "shapes": {}, "files": {}}


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"format": 3}, "it lacks 'step'"),
        ({k: v for k, v in WHOLE.items() if k != "files"}, "it lacks 'files'"),
        ({**WHOLE, "files": [1]}, "'list' object"),
        ({**WHOLE, "step": "one"}, ""),
        ({**WHOLE, "shapes": {"a": 3}}, "'int' object"),
        ({**WHOLE, "files": {"a": {"tensors": {}}}}, "it lacks 'sha256'"),
        ({**WHOLE, "files": {"a": {"sha256": "", "tensors": {"t": ["t", "master", 0]}}}}, "not enough values"),
        ({**WHOLE, "files": {"a": {"sha256": "", "tensors": {"t": ["t", "master", 0, None]}}}}, "no part of a tensor"),
    ],
)
def test_a_damaged_manifest(empty: Path, manifest: dict[str, Any], words: str) -> None:
    for step in (1, 2):
        write_json(empty / "checkpoints" / f"step-{step:08d}" / "manifest.json", manifest)
    with pytest.raises(ConfigError) as caught:
        Reader(empty / "checkpoints" / "step-00000002")
    assert "step-00000002/manifest.json is damaged: " in caught.value.message
    assert words in caught.value.message
    assert "step-00000001" in caught.value.hint


def test_logs_as_one_document(empty: Path) -> None:
    (empty / "run" / "launch").mkdir(parents=True)
    (empty / "run" / "logs").mkdir()
    for rank in (1, 0):
        (empty / "run" / "logs" / f"rank-{rank}.log").write_text(f"hello {rank}\nbye\n")
    result = CliRunner().invoke(app, ["logs", "run", "--json"])
    lines = [(line["rank"], line["line"]) for line in json.loads(result.stdout)["lines"]]
    assert lines == [(0, "hello 0"), (0, "bye"), (1, "hello 1"), (1, "bye")]
    only = CliRunner().invoke(app, ["logs", "run", "--rank", "1"]).stdout
    assert only == "[1] hello 1\n[1] bye\n"


def test_a_wrong_resume_and_a_damaged_checkpoint_path(empty: Path) -> None:
    error = outcome("train", "--resume", "elsewhere", "--set", "train.steps=1")
    assert error.exit_code == 2
    assert "not a checkpoint" in error.message
    assert not (empty / "runs").exists()
