"""Another model family is one row: its config.json, its files, its plans and its training follow from that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from hetctl.comm.contract.emulate import Machine, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.families.family import Family
from hetctl.trainer.families.registry import FAMILIES
from hetctl.trainer.job import Job
from hetctl.trainer.loop.build import build
from hetctl.trainer.model.config import config_of, find_shape
from hetctl.trainer.model.huggingface import WeightFiles, check_weights, write_model
from hetctl.trainer.model.model import Block, StageModel
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.planning.executable import check_trainable
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import ModelSection, Recipe
from tests.comm.spawn import on_islands
from tests.trainer.parity import (
    SEQ_LEN,
    SHAPE,
    STEPS,
    Trace,
    UnevenSamples,
    difference,
    initialise,
    recipe,
    reference,
    traced_step,
)


class SandwichBlock(Block):
    """With a norm behind the attention as well."""

    def __init__(self, shape: ModelShape, layer: int, **more: object) -> None:
        super().__init__(shape, layer, **more)  # type: ignore[arg-type]
        self.after_norm = nn.RMSNorm(shape.hidden, shape.rms_eps)

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None) -> Tensor:
        x = x + self.after_norm(self.self_attn(self.input_layernorm(x), cos, sin, documents))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


TOY = Family(
    "toy",
    "ToyForCausalLM",
    qkv_bias=False,
    out_bias=True,
    gated=False,
    activations=("relu",),
    config_keys={"num_hidden_layers": "n_layer", "hidden_size": "n_embd"},
    tensor_names={"self_attn.": "attention.", "mlp.up_proj": "mlp.into", "mlp.down_proj": "mlp.out_of"},
    block=lambda: SandwichBlock,
)
CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "model_type": "toy",
    "n_layer": 4,
    "n_embd": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 48,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "hidden_act": "relu",
    "torch_dtype": "float32",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toy's config.json, where the family is registered."""
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def trained(rank: int, plan: Plan, asked: Recipe, shape: ModelShape) -> Trace:
    FAMILIES["toy"] = TOY  # in this process
    job = Job(plan, asked, shape, checkpoints="unused")
    trainer = build(job, torch.device("cpu"), training=UnevenSamples(plan.global_batch))
    trace = Trace([], [], [])
    for step in range(STEPS):
        traced_step(trainer, step, trace)
    trainer.batches.close()
    return trace


def test_a_registered_family_is_planned_and_trained(config: Path) -> None:
    asked = recipe("adamw", clip_norm=0.5, global_batch=8)
    asked = replace(asked, model=ModelSection(str(config), SEQ_LEN), parallelism=replace(asked.parallelism, pipeline=2))
    machine = Machine("here", "gloo", (2 * 2**30,) * 2)
    plan = make_plan(label_machine(parse_spec("b200:1,mi100:1", CLASSES), machine), asked)
    shape = asked.shape()
    check_trainable(shape, plan)
    assert len(plan.replicas[0].stages) == 2
    wanted = reference(asked, shape)
    assert "model.layers.0.after_norm.weight" in wanted.parameters[-1]
    assert difference(on_islands((1, 1), trained, plan, asked, shape), wanted) < 1e-10


def test_its_shape_travels_to_config_json_and_back(config: Path) -> None:
    shape = find_shape(str(config))
    assert (shape.layers, shape.hidden, shape.qkv_bias, shape.out_bias, shape.gated) == (4, 16, False, True, False)
    assert config_of(shape, dtype="float32") == CONFIG
    config.write_text(json.dumps(CONFIG | {"n_embd": "16"}))
    with pytest.raises(ConfigError, match="'n_embd' must be a whole number"):
        find_shape(str(config))
    config.write_text(json.dumps(CONFIG | {"hidden_act": "silu"}))
    with pytest.raises(ConfigError, match="hidden_act 'silu' is not supported"):
        find_shape(str(config))


def test_its_files_call_tensors_by_its_own_names(config: Path) -> None:
    shape, folder = find_shape(str(config)), config.parent
    model = StageModel(shape, (0, shape.layers))
    initialise(model, 3)
    named: dict[str, nn.Parameter] = model.named()
    write_model(folder, CONFIG, named, lambda name: named[name].detach(), dtype=torch.float32)
    check_weights(folder, shape)
    with safe_open(str(folder / "model.safetensors"), framework="pt") as file:
        held = set(file.keys())
    assert "model.layers.3.attention.o_proj.bias" in held
    assert "model.layers.0.mlp.into.weight" in held
    assert not [name for name in held if "self_attn" in name or "_proj.weight" in name.partition("mlp")[2]]
    files = WeightFiles(folder, shape)
    assert all(torch.equal(files.read(name, p.shape), p) for name, p in named.items())


def test_what_nobody_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match="family 'toi' is not known"):
        _ = replace(SHAPE, family="toi").gated
