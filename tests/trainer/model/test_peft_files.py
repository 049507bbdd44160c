"""Adapters in PEFT's files: what `peft` computes with them and trains, and what they come to when merged."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetctl.trainer.data.batches import Dataset
from hetctl.trainer.gradients.optimizer import learning_rate
from hetctl.trainer.model.adapters import Adapters, is_trained
from hetctl.trainer.model.config import config_of, find_shape
from hetctl.trainer.model.head_loss import IGNORED
from hetctl.trainer.model.huggingface import WeightFiles, write_model
from hetctl.trainer.model.model import StageModel, shapes_of
from hetctl.trainer.model.peft_files import merged, write_adapters
from hetctl.trainer.model.shapes import ModelShape
from tests.trainer.loop.test_parity import ADAPTED
from tests.trainer.model.transformers_families import in_double, theirs
from tests.trainer.parity import STEPS, UnevenSamples, initialise, recipe, reference, summed_loss

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
TOLERANCE = 1e-9
FAMILIES = ["llama", "llama, biases", "qwen3", "gemma2", "phi3", "olmo2", "granite", "opt, tied"]


def adapted_from(folder: Path, targets: tuple[str, ...]) -> tuple[ModelShape, StageModel]:
    """Our model of a folder, with random adapters."""
    base = find_shape(str(folder))
    shape = replace(base, adapters=Adapters(3, 5.0, targets or tuple(base.projections)))
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
@pytest.mark.parametrize("name", FAMILIES)
def test_peft_and_merged_weights_compute_what_ours_does(name: str, targets: Any, tmp_path: Path) -> None:
    torch.manual_seed(5)
    with in_double():
        theirs(name).save_pretrained(tmp_path / "base")
    shape, model = adapted_from(tmp_path / "base", targets)
    named = {n: p.detach() for n, p in model.named().items()}
    base, dtype = str(tmp_path / "base"), torch.float64
    write_adapters(tmp_path / "peft", shape, shapes_of(shape), named.__getitem__, base=base, dtype=dtype)
    whole = shapes_of(replace(shape, adapters=None))
    write_model(
        tmp_path / "merged",
        config_of(shape, dtype="float64"),
        whole,
        lambda n: merged(n, shape, named.__getitem__, named.__getitem__),
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


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_twenty_steps_of_a_plain_loop_with_peft(optimizer: str, tmp_path: Path) -> None:
    """What all layouts are held to (`test_parity.py`) is what `peft` trains."""
    asked, shape = recipe(optimizer, clip_norm=0.5, global_batch=8), ADAPTED
    start = StageModel(shape, (0, shape.layers)).double()
    initialise(start, asked.train.seed)
    named = {n: p.detach() for n, p in start.named().items()}
    whole, dtype = shapes_of(replace(shape, adapters=None)), torch.float64
    write_model(tmp_path / "base", config_of(shape, dtype="float64"), whole, named.__getitem__, dtype=dtype)
    write_adapters(tmp_path / "peft", shape, shapes_of(shape), named.__getitem__, base="", dtype=dtype)
    model = peft.PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "peft", is_trainable=True)
    wanted = reference(asked, shape)
    with in_double():
        losses, norms = plain_loop(model, asked, UnevenSamples(8))
    assert max(abs(a - b) for a, b in zip(losses, wanted.losses, strict=True)) < TOLERANCE
    assert max(abs(a - b) for a, b in zip(norms, wanted.norms, strict=True)) < TOLERANCE
    assert losses[-1] < losses[0]
    for name, value in model.named_parameters():
        if value.requires_grad:
            ours = name.removeprefix("base_model.model.").replace(".default", "")
            assert float((value.detach() - wanted.parameters[-1][ours]).abs().max()) < TOLERANCE


def plain_loop(model: Any, asked: Any, data: Dataset) -> tuple[list[float], list[float]]:
    """Loss and gradient norm of each step of one process."""
    section, trained = asked.optimizer, [p for p in model.parameters() if p.requires_grad]
    decay = section.weight_decay
    if section.name == "sgd":
        optimizer: Any = torch.optim.SGD(trained, lr=1.0, weight_decay=decay)
    else:
        betas = (section.beta1, section.beta2)
        optimizer = torch.optim.AdamW(trained, betas=betas, eps=section.eps, weight_decay=decay)
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = (torch.as_tensor(a) for a in data.batch(step, 0, 8))
        loss = summed_loss(model(input_ids=inputs).logits, targets) / (targets != IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in trained)))
        for parameter in trained:
            parameter.grad.mul_(min(1.0, section.clip_norm / norms[-1]))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, section)
        optimizer.step()
        losses.append(loss.item())
    return losses, norms
