"""Activations on the host: all of a block's leave, parameters and tables stay, gradients are the same."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.model import activations
from hetctl.trainer.model.activations import HostActivations
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.model.shapes import ModelShape
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.recipe import load_recipe
from tests.trainer.parity import initialise

SHAPE = ModelShape("tiny", "llama", layers=5, hidden=16, heads=4, kv_heads=2, intermediate=24, vocab=48)


def model() -> StageModel:
    made = StageModel(SHAPE, (1, 4))
    initialise(made, 3)
    return made


def test_blocks_save_nothing_but_parameters_and_tables_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[torch.Tensor] = []
    right = activations.SavedTensor.to_host

    def noted(self: activations.SavedTensor) -> None:
        assert self.device is not None
        left.append(self.device)
        right(self)

    monkeypatch.setattr(activations.SavedTensor, "to_host", noted)
    moved, plain = model(), model()
    moved.host_activations = HostActivations(torch.device("cpu"), kept=moved.parameters())
    x = torch.randn(2, 6, 16, requires_grad=True)
    y = moved(x)
    own = {p.data_ptr() for p in moved.parameters()} | {t.data_ptr() for t in moved.rotary(x, False)}
    assert not own & {t.data_ptr() for t in left}
    assert sum(t.nbytes for t in left) > 3 * 24 * 2 * 6 * 4  # more than the MLPs' inner values
    y.backward(torch.ones_like(y))
    z = x.detach().clone().requires_grad_()
    plain(z).backward(torch.ones_like(y))
    assert torch.equal(x.grad, z.grad)  # type: ignore[arg-type]
    for a, b in zip(moved.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_micro_batches_in_flight_do_not_mix() -> None:
    moved, plain = model(), model()
    moved.host_activations = HostActivations(torch.device("cpu"), kept=moved.parameters())
    inputs = [torch.randn(1, 6, 16) for _ in range(3)]
    for one in (moved, plain):
        outputs = [one(x.clone().requires_grad_()) for x in inputs]
        for y in outputs:
            y.sum().backward()
    for a, b in zip(moved.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def planned(*sets: tuple[str, object]) -> Plan:
    base = [("model.name", "llama-8b"), ("model.seq_len", 4096), ("batch.global_batch", 64)]
    return make_plan(describe_cluster(parse_spec("h200:4", CLASSES), CLASSES), load_recipe(None, [*base, *sets]))


def test_a_plan_may_keep_them_on_the_host_for_time_and_against_memory() -> None:
    fixed = [("parallelism.pipeline", 2), ("batch.micro_batch_size", 2), ("parallelism.recompute", "none")]
    device = planned(*fixed, ("parallelism.activations", "device"))
    host = planned(*fixed, ("parallelism.activations", "host"))
    assert all(s.offload_activations for r in host.replicas for s in r.stages)
    assert device.predicted is not None
    assert host.predicted is not None
    assert host.predicted.memory_bytes[0] < device.predicted.memory_bytes[0]
    assert host.predicted.step_time_s >= device.predicted.step_time_s
    assert any("activations on the host" in reason for reason in host.reasons)


def test_what_is_on_the_host_is_not_computed_again() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        planned(("parallelism.activations", "host"), ("parallelism.recompute", "full"))


def test_selective_recomputation_makes_again_what_an_adapter_adds() -> None:
    def decision(tokens: int, into: int, out: int) -> CheckpointPolicy:
        return activations._policy(None, torch.ops.aten.mm.default, torch.ones(tokens, into), torch.ones(into, out))

    assert decision(8, 4096, 16) == decision(8, 4096, 4096) == CheckpointPolicy.MUST_SAVE
    assert decision(8, 16, 4096) == CheckpointPolicy.PREFER_RECOMPUTE
    assert decision(8, 64, 64) == CheckpointPolicy.MUST_SAVE
