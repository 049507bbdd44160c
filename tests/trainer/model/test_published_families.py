"""Every family in all its variants equals transformers: logits, every gradient, and its files, there and back."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.families.registry import family_of, trained_families
from hetctl.trainer.model.config import config_of, find_shape, shape_from_config
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.huggingface import WeightFiles, write_model
from hetctl.trainer.model.model import StageModel, shapes_of
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from tests.trainer.model.transformers_families import VARIANTS, in_double, theirs
from tests.trainer.parity import summed_loss

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-10
SEQ_LEN = 24


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets [2, SEQ_LEN]; not the padding token, whose row of the table transformers does not train."""
    torch.manual_seed(3)
    tokens, targets = torch.randint(3, 64, (2, 2, SEQ_LEN))
    targets[0, :5] = IGNORED
    return tokens, targets


def ours_from(folder: Path) -> tuple[ModelShape, StageModel]:
    shape = find_shape(str(folder))
    model, files = StageModel(shape, (0, shape.layers)).double(), WeightFiles(folder, shape)
    with torch.no_grad():
        for name, parameter in model.named().items():
            parameter.copy_(files.read(name, parameter.shape))
    return shape, model


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_gradients_and_files_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    tokens, targets = samples()
    with in_double():
        model = theirs(name)
        logits = model(tokens).logits
        loss = summed_loss(logits, targets)
        loss.backward()
    split = "tied" in name  # over several files, which an index lists
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB" if split else "1GB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists() == split
    shape, ours = ours_from(tmp_path / "theirs")
    assert float((ours(tokens) - logits).abs().max()) < TOLERANCE
    scaled, losses = ours.loss(tokens, targets, scale=1.0)
    scaled.backward()
    assert abs(float(losses.sum() - loss)) < TOLERANCE
    wanted = {n: p.grad for n, p in model.named_parameters()}
    found = {n: p.grad for n, p in ours.named().items()}
    assert all(g is not None for g in found.values())
    for tensor, (parts, grads) in joined(shape, found).items():
        assert float((torch.cat(grads) - wanted.pop(tensor)).abs().max()) < TOLERANCE, parts
    assert not wanted, "transformers has parameters that ours lacks"

    named = {n: p.detach() for n, p in ours.named().items()}
    write_model(
        tmp_path / "back",
        config_of(shape, dtype="float64"),
        named,
        named.__getitem__,
        dtype=torch.float64,
        max_file_bytes=20_000 if split else 1 << 30,
    )
    assert replace(find_shape(str(tmp_path / "back")), name=shape.name) == shape
    with in_double():
        back = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "back", attn_implementation="eager", dtype=torch.float64
        ).eval()
        assert type(back) is type(model)
        assert float((back(tokens).logits - logits).abs().max()) < TOLERANCE


def joined(shape: ModelShape, grads: dict[str, Any]) -> dict[str, tuple[tuple[str, ...], list[torch.Tensor]]]:
    """Gradients by the family's own tensors: (our parameters in it, their gradients)."""
    found = {}
    for name in grads:
        tensor, parts = family_of(shape.family).parts(name)
        found[tensor] = (parts, [grads[part] for part in parts])
    return found


@pytest.mark.parametrize(
    "name", [n for n, s in SHAPES.items() if s.family in {f.model_type for f in trained_families()}]
)
def test_known_sizes_are_read_back_from_their_own_config(name: str) -> None:
    shape = SHAPES[name]
    shape.validate()
    read = shape_from_config(config_of(shape, dtype="bfloat16"), where="x")
    assert replace(read, name=name) == shape


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_248_023_552),
        ("gemma2-9b", 9_241_705_984),
        ("gemma3-4b", 3_880_263_168),
        ("phi4", 14_659_507_200),
        ("olmo2-7b", 7_298_617_344),
        ("smollm3-3b", 3_075_098_624),
        ("granite3-8b", 8_170_848_256),
    ],
)
def test_known_sizes_have_as_many_parameters_as_the_published_models(name: str, parameters: int) -> None:
    assert SHAPES[name].parameters == parameters


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_counted_exactly(name: str) -> None:
    with in_double():
        config = theirs(name).config.to_dict()
    shape = shape_from_config(config, where="x")
    assert sum(math.prod(size) for size in shapes_of(shape).values()) == shape.parameters


BASE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mistrall"}, "'mistrall' is not supported"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' must be finite and positive"),
        ({"model_type": "gemma2", "attn_logit_softcapping": -1}, "attention_cap must be finite and at least 0"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "'layer_types' must be a list of at least 2"),
        ({"model_type": "gemma2", "layer_types": ["chunked", "chunked"]}, "'chunked' in layer_types is not supported"),
        ({"model_type": "granite", "logits_scaling": 0.0}, "'logits_scaling' must be finite and positive"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported in llama"),
        ({"model_type": "phi3", "partial_rotary_factor": 0.1}, "rotary embeddings need an even head size"),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1], "long_factor": [1]}},
            "longrope needs 4 short and as many long factors",
        ),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "'no_rope_layers' must be a list of at least 2"),
        ({"model_type": "mistral", "sliding_window": -4}, "windows must be at least 0 tokens"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shape_from_config({**BASE, **config}, where="x")


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as refused:
        shape_from_config({**BASE, "model_type": "qwen3_moe"}, where="x")
    assert "qwen3" in str(refused.value.hint)
