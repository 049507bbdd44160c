"""Adapters in PEFT's files: what `peft` computes with them and trains, and what they come to when merged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.trainer.data.batches import Dataset
from hetctl.trainer.gradients.optimizer import learning_rate
from hetctl.trainer.model.adapters import MAGNITUDE, Adapters, is_trained
from hetctl.trainer.model.config import config_of, find_shape
from hetctl.trainer.model.dropout import InputDropout, draws_of, of_layer
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.huggingface import WeightFiles, write_model
from hetctl.trainer.model.model import StageModel, shapes_of
from hetctl.trainer.model.peft_files import merged, write_adapters
from hetctl.trainer.model.shapes import ModelShape
from tests.trainer.loop.test_parity import ADAPTED, DORA
from tests.trainer.model.transformers_families import in_double, theirs
from tests.trainer.parity import STEPS, UnevenSamples, initialise, recipe, reference, summed_loss

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
TOLERANCE = 1e-9
FAMILIES = ["llama", "llama, biases", "qwen3", "gemma2", "phi3", "olmo2", "granite", "opt, tied"]


def adapted_from(folder: Path, targets: tuple[str, ...], dora: bool) -> tuple[ModelShape, StageModel]:
    """Our model of a folder, with random adapters."""
    base = find_shape(str(folder))
    shape = replace(base, adapters=Adapters(3, 5.0, targets or tuple(base.projections), dora))
    model, files = StageModel(shape, (0, shape.layers)).double(), WeightFiles(folder, base)
    with torch.no_grad():
        for name, parameter in model.named().items():
            if not is_trained(name, shape.adapters):
                parameter.copy_(files.read(name, parameter.shape))
            else:
                parameter.normal_(std=0.2)
    return shape, model


def loaded(folder: Path) -> Any:
    with in_double():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float64
        ).eval()


@pytest.mark.parametrize("targets", [(), ("v_proj", "down_proj")], ids=["all-linear", "two"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_peft_and_merged_weights_compute_what_ours_does(name: str, targets: Any, dora: bool, tmp_path: Path) -> None:
    torch.manual_seed(5)
    with in_double():
        theirs(name).save_pretrained(tmp_path / "base")
    shape, model = adapted_from(tmp_path / "base", targets, dora)
    named = {n: p.detach() for n, p in model.named().items()}
    base, dtype = str(tmp_path / "base"), torch.float64
    read = named.__getitem__
    write_adapters(tmp_path / "peft", shape, shapes_of(shape), read, weight=read, base=base, dtype=dtype)
    whole = shapes_of(replace(shape, adapters=None))
    write_model(
        tmp_path / "merged",
        config_of(shape, dtype="float64"),
        whole,
        lambda n: merged(n, shape, read, read),
        dtype=dtype,
    )
    tokens = torch.randint(3, 64, (2, 24))
    with torch.no_grad(), in_double():
        wanted = model(tokens)
        plain = loaded(tmp_path / "base")
        assert float((plain(tokens).logits - wanted).abs().max()) > 1e-3
        found = peft.PeftModel.from_pretrained(plain, tmp_path / "peft")
        assert float((found(tokens).logits - wanted).abs().max()) < TOLERANCE
        assert float((loaded(tmp_path / "merged")(tokens).logits - wanted).abs().max()) < TOLERANCE


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("shape", [ADAPTED, DORA], ids=["lora", "dora"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_twenty_steps_of_a_plain_loop_with_peft(
    optimizer: str, shape: ModelShape, dropout: float, tmp_path: Path
) -> None:
    """What all layouts are held to (`test_parity.py`) is what `peft` trains."""
    asked = recipe(optimizer, clip_norm=0.5, global_batch=8)
    shape = replace(shape, adapters=replace(shape.adapters, dropout=dropout))
    model = peft_start(shape, asked.train.seed, tmp_path)
    if dropout:
        drops_as_ours(model.train(), dropout)
    wanted = reference(asked, shape)
    with in_double():
        losses, norms = plain_loop(model, asked, UnevenSamples(8))
    assert max(abs(a - b) for a, b in zip(losses, wanted.losses, strict=True)) < TOLERANCE
    assert max(abs(a - b) for a, b in zip(norms, wanted.norms, strict=True)) < TOLERANCE
    assert losses[-1] < losses[0]
    for name, value in model.named_parameters():
        if value.requires_grad:
            assert float((value.detach() - wanted.parameters[-1][ours_of(name)]).abs().max()) < TOLERANCE


def peft_start(shape: ModelShape, seed: int, folder: Path) -> Any:
    """What our training starts with, as a model of peft's."""
    start = StageModel(shape, (0, shape.layers)).double()
    initialise(start, seed)
    named = {n: p.detach() for n, p in start.named().items()}
    whole, dtype = shapes_of(replace(shape, adapters=None)), torch.float64
    write_model(folder / "base", config_of(shape, dtype="float64"), whole, named.__getitem__, dtype=dtype)
    read = named.__getitem__
    write_adapters(folder / "peft", shape, shapes_of(shape), read, weight=read, base="", dtype=dtype)
    return peft.PeftModel.from_pretrained(loaded(folder / "base"), folder / "peft", is_trainable=True)


def ours_of(name: str) -> str:
    """Our name of a parameter of peft's."""
    ours = name.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")
    return ours.replace(f"{MAGNITUDE}.weight", MAGNITUDE)


class OurDropout(torch.nn.Module):
    """In the place of torch's own: what is left out is ours, and all else peft's."""

    step = 0

    def __init__(self, share: float, projection: str, layer: int) -> None:
        super().__init__()
        self.ours, self.layer = InputDropout(share, projection, low=0), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = OurDropout.step * len(x) + torch.arange(len(x))
        return x * self.ours.mask(of_layer(draws_of(numbers, 0), self.layer), x)


def drops_as_ours(model: Any, share: float) -> None:
    for path, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            assert isinstance(module.lora_dropout["default"], torch.nn.Dropout), "peft was told to drop"
            _, layer, _, projection = path.rsplit(".", 3)
            module.lora_dropout["default"] = OurDropout(share, projection, int(layer))


def plain_loop(model: Any, asked: Any, data: Dataset) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step of one process."""
    losses, norms = [], []

    def loss_of(step: int) -> torch.Tensor:
        OurDropout.step = step
        inputs, targets = (torch.as_tensor(a) for a in data.batch(step, 0, 8))
        return summed_loss(model(input_ids=inputs).logits, targets) / (targets != IGNORED).sum()

    for loss, norm in plain_steps(model, asked, loss_of):
        losses.append(loss)
        norms.append(norm)
    return losses, norms


def plain_steps(model: Any, asked: Any, loss_of: Callable[[int], torch.Tensor]) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of each step, which has just been made."""
    section, trained = asked.optimizer, [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
    groups = [g | {"weight_decay": w} for g, w in zip(groups, (section.weight_decay, 0.0), strict=True) if g["params"]]
    if section.name == "sgd":
        optimizer: Any = torch.optim.SGD(groups, lr=1.0)
    else:
        betas = (section.beta1, section.beta2)
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=section.eps)
    for step in range(STEPS):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained))
        for parameter in trained:
            parameter.grad.mul_(min(1.0, section.clip_norm / norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, section)
        optimizer.step()
        yield loss.item(), norm
