"""Our models against transformers: the same weights give the same logits, and files travel both ways."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.model.config import config_of, find_shape, shape_from_config
from hetctl.trainer.model.head_loss import IGNORED, head_loss
from hetctl.trainer.model.huggingface import WeightFiles, check_weights, write_model
from hetctl.trainer.model.initial_weights import CHUNK, fill_normal
from hetctl.trainer.model.model import StageModel, shapes_of
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from tests.trainer.model.transformers_families import LLAMA3, YARN
from tests.trainer.parity import initialise, summed_loss

transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def theirs(family: str = "Qwen2", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def load_weights(folder: Path, parameters: Mapping[str, torch.Tensor], shape: ModelShape) -> None:
    """Fill parameters by their Hugging Face names, in their own precision."""
    files = WeightFiles(folder, shape)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(files.read(name, parameter.shape))


def test_opt_has_the_published_number_of_parameters() -> None:
    for name, parameters in (("opt-125m", 125_239_296), ("opt-6.7b", 6_658_473_984)):
        assert SHAPES[name].parameters == parameters
    tiny = replace(
        SHAPES["opt-125m"], layers=2, hidden=64, intermediate=256, vocab=128, heads=4, kv_heads=4, head_dim=16
    )
    for shape in (tiny, replace(tiny, tied_embeddings=False)):
        assert sum(math.prod(size) for size in shapes_of(shape).values()) == shape.parameters


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("word_embed_proj_dim", 32, "word_embed_proj_dim unlike hidden_size"),  # OPT-350M
        ("do_layer_norm_before", False, "do_layer_norm_before=False"),
        ("enable_bias", False, "enable_bias=False"),
        ("activation_function", "gelu", "activation_function 'gelu'"),
    ],
)
def test_what_opt_may_be_and_is_not_here(key: str, value: object, why: str) -> None:
    config = {"model_type": "opt", **SIZES, "ffn_dim": 96, "num_key_value_heads": 4}
    assert shape_from_config(config, where="x").tied_embeddings
    with pytest.raises(ConfigError, match=why):
        shape_from_config(config | {key: value}, where="x")


def test_every_exported_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    tensors = {n: p.detach() for n, p in StageModel(SHAPES["demo"], (0, SHAPES["demo"].layers)).named().items()}
    write_model(tmp_path, config_of(SHAPES["demo"], dtype="float32"), tensors, tensors.__getitem__, dtype=torch.float32)
    (tmp_path / "plain").touch()
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_stages_together_are_the_whole_model() -> None:
    shape = shape_from_config({"model_type": "qwen2", **SIZES}, where="x")
    whole, first, last = (StageModel(shape, span) for span in ((0, 3), (0, 1), (1, 3)))
    for model in (whole, first, last):
        initialise(model, 7)
    tokens = torch.randint(0, 128, (1, 16))
    with torch.no_grad():
        assert torch.equal(whole(tokens), last(first(tokens)))


def test_a_scale_keeps_fp16_gradients_of_words_that_are_hardly_probable() -> None:
    """At 1e-9, far below what fp16 holds: scaled before they are rounded, not after."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(1, 6, 8), 0.1 * torch.randn(50, 8)
    hidden[..., 0], weight[:2, 0], weight[2:, 0] = 1, 10, -10
    targets = torch.randint(0, 2, (1, 6))

    def gradient(dtype: torch.dtype, scale: float) -> torch.Tensor:
        h, w = (x.to(dtype).requires_grad_() for x in (hidden, weight.half()))
        head_loss(h, w, targets, scale=scale)[0].backward()
        assert w.grad is not None
        return w.grad[2:].double() / scale

    wanted = gradient(torch.float64, 1.0)
    assert 0 < wanted.abs().max() < 1e-7
    assert torch.allclose(gradient(torch.float16, 2.0**13), wanted, rtol=0.02, atol=float(wanted.abs().max()) / 50)
    assert not gradient(torch.float16, 1.0).any()


def test_head_loss_is_cross_entropy_with_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 9, 8, dtype=torch.float64), torch.randn(21, 8, dtype=torch.float64)
    targets = torch.randint(0, 21, (2, 9))
    targets[0, 4:] = IGNORED
    found = []
    for chunk in (1, 1 << 30):
        monkeypatch.setattr("hetctl.trainer.model.head_loss.CHUNK_BYTES", chunk * 21 * 4)
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        scaled, losses = head_loss(h, w, targets, scale=0.25)
        scaled.backward()
        total = losses.sum()
        found.append((total, h.grad, w.grad))
        with torch.no_grad():
            assert torch.allclose(head_loss(h, w, targets, scale=1.0)[1], losses)
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total = summed_loss(h @ w.t(), targets)
    (total * 0.25).backward()
    for one in found:
        for a, b in zip(one, (total, h.grad, w.grad), strict=True):
            assert a is not None
            assert b is not None
            assert torch.allclose(a, b, atol=1e-12)


def test_random_weights_depend_on_their_place_alone() -> None:
    whole, part = torch.empty(CHUNK + 77), torch.empty(50)
    fill_normal(whole, seed=3, name="a", std=0.02)
    fill_normal(part, seed=3, name="a", std=0.02, first=CHUNK - 20)
    assert torch.equal(part, whole[CHUNK - 20 : CHUNK + 30])
    assert whole.mean().abs() < 1e-4
    assert whole.std() == pytest.approx(0.02, rel=1e-2)
    other = torch.empty(50)
    fill_normal(other, seed=3, name="b", std=0.02)
    assert not torch.equal(other, whole[:50])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]"),
        ({"tie_word_embeddings": "false"}, "'tie_word_embeddings' must be true or false, found 'false'"),
        ({"attention_bias": 0}, "'attention_bias' must be true or false"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": "64"},
            "'sliding_window' must be a whole number",
        ),
        ({"num_hidden_layers": 10**9}, "layers must be at most 2000, found 1000000000"),
        ({"hidden_size": 10**400}, "hidden must be at most 2147483647"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps must be finite and at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite and at least 0"),
        ({"rope_theta": 0}, "rope_theta must be finite and positive, found 0.0"),
        ({"rope_theta": -1e4}, "rope_theta must be finite and positive"),
        ({"rope_theta": 10**400}, "'rope_theta' is too large a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be finite and positive"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' must be a number, found None"),
        *(({"rope_parameters": {**LLAMA3, key: None}}, f"'{key}' must be") for key in list(LLAMA3)[2:5]),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1}}, "high_freq_factor must be larger"),
        ({"rope_parameters": {**YARN, "factor": None}}, "'factor' must be a number"),
        ({"rope_parameters": {**YARN, "original_max_position_embeddings": 0}}, "original_max_seq_len must be"),
        ({"rope_parameters": {**YARN, "beta_slow": 0}}, "beta_slow must be finite and positive"),
        ({"rope_parameters": {**YARN, "rope_theta": 1}}, "rope_theta must be larger than 1 for yarn"),
    ],
)
def test_configs_that_are_not_followed_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        shape_from_config({"model_type": "llama", **SIZES, **change}, where="config.json")


def test_broken_weights_are_named(tmp_path: Path) -> None:
    theirs("Llama").save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    file = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match="has no 'model"):
        WeightFiles(tmp_path, shape).read("model.layers.9.mlp.up_proj.weight", (1, 1))
    with pytest.raises(ConfigError, match="has shape"):
        WeightFiles(tmp_path, shape).read("model.norm.weight", (shape.hidden + 1,))
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="damaged or cut short"):
        check_weights(tmp_path, shape)


def rewritten(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> ModelShape:
    """The folder's single file with its tensors edited; the shape of its config."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return find_shape(str(folder))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Phi3"])
def test_weights_are_checked_by_what_the_model_needs(family: str, tied: bool, tmp_path: Path) -> None:
    theirs(family, tie_word_embeddings=tied, pad_token_id=None).save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    check_weights(tmp_path, shape)
    rewritten(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(128, 64)}))
    check_weights(tmp_path, shape)  # a tied head may be there as well
    rewritten(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    if shape.tied_embeddings:
        check_weights(tmp_path, shape)
    else:
        with pytest.raises(ConfigError, match=r"model\.safetensors has no 'lm_head\.weight'$"):
            check_weights(tmp_path, shape)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_proj.bias"), "has no 'model.layers.1.self_attn.q_proj.bias'$"),
        (
            lambda t: [t.pop(name) for name in list(t) if ".mlp." in name],
            r"has no 'model.layers.0.mlp.gate_proj.weight' \(8 more are missing or of another shape or type\)$",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
            r"'model.norm.weight' has shape \[65\] in .*model.safetensors, config.json says \[64\]$",
        ),
    ],
)
def test_weights_of_another_model_are_named(
    edit: Callable[[dict[str, torch.Tensor]], object], words: str, tmp_path: Path
) -> None:
    theirs().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        check_weights(tmp_path, rewritten(tmp_path, edit))


@pytest.mark.parametrize("kind", ["int8", "int64", "bool", "float8_e4m3fn", "complex64"])
def test_weights_that_are_no_floats_are_named(kind: str, tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    edit = lambda t: t.update({"model.norm.weight": torch.ones(64).to(getattr(torch, kind))})  # noqa: E731
    shape = rewritten(tmp_path, edit)
    for look in (
        lambda: check_weights(tmp_path, shape),
        lambda: WeightFiles(tmp_path, shape).read("model.norm.weight", (64,)),
    ):
        with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is stored as \w+ in .*model\.safetensors"):
            look()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_weights_of_any_plain_float_are_read(kind: torch.dtype, tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    shape = rewritten(tmp_path, lambda t: t.update({name: tensor.to(kind) for name, tensor in t.items()}))
    check_weights(tmp_path, shape)
    load_weights(tmp_path, StageModel(shape, (0, shape.layers)).named(), shape)


def test_an_index_that_names_the_wrong_file(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    where = found["weight_map"]
    others = [file for file in where.values() if file != where["model.norm.weight"]]
    where["model.norm.weight"] = others[0]
    index.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=rf"{others[0]} has no 'model.norm.weight', which .* says it holds$"):
        check_weights(tmp_path, find_shape(str(tmp_path)))
