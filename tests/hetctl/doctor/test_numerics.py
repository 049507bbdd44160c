"""The numerics gate on a CPU: right kernels pass, one scaled by 1 + 1e-2 is caught in every operation and dtype."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from hetctl.comm.contract.cluster import Access
from hetctl.discovery.fabric import build
from hetctl.discovery.inventory import InventoryHost
from hetctl.doctor import perf, perf_program
from hetctl.doctor.check import HostCase
from tests.hetctl.doctor import healthy_hosts

CPU = torch.device("cpu")


def scaled(_: str, work: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: work(*inputs) * 1.01


@pytest.fixture(scope="module")
def right() -> list[dict[str, Any]]:
    return perf_program.numerics(torch, CPU)


@pytest.fixture(scope="module")
def wrong() -> list[dict[str, Any]]:
    return perf_program.numerics(torch, CPU, change=scaled)


def test_right_kernels_pass_with_room_to_spare(right: list[dict[str, Any]]) -> None:
    assert len(right) == len(perf_program.OPERATIONS) * len(perf_program.DTYPES)
    assert [perf.judge_row(row, "cpu").reason for row in right] == ["within rounding"] * len(right)
    for row in right:
        for way in ("forward", "backward"):
            assert row[way]["max_eps"] < perf.LIMITS[row["dtype"]]["max_eps"] / 2


def test_a_kernel_scaled_by_a_hundredth_is_caught_everywhere(wrong: list[dict[str, Any]]) -> None:
    verdicts = [perf.judge_row(row, "cpu") for row in wrong]
    assert [v.state for v in verdicts] == ["fail"] * len(wrong)
    assert all("common factor" in v.reason for v in verdicts)


def test_a_kernel_wrong_in_its_gradient_only_is_caught() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * 1.01

    row = {"operation": "softmax", "dtype": "bfloat16"}
    found = perf_program.compare(
        torch, CPU, "softmax", "bfloat16", lambda _, work: lambda *inputs: Wrong.apply(work(*inputs))
    )
    verdict = perf.judge_row({**row, **found}, "cpu")
    assert verdict.state == "fail"
    assert "backward" in verdict.reason


def test_values_that_are_not_finite_are_caught() -> None:
    found = perf_program.compare(torch, CPU, "matmul", "float32", lambda _, work: lambda *i: work(*i) / 0)
    assert perf.judge_row({"operation": "matmul", "dtype": "float32", **found}, "x").reason.endswith("not finite")


def test_device_classes_are_compared_with_each_other(right: list[dict[str, Any]]) -> None:
    far = [{**row, "sample": [v * 3 for v in row["sample"]]} for row in right]
    found = healthy_hosts.checked(healthy_hosts.reports())
    of = {name: {"devices": [{"index": 0, "numerics": right}]} for name in ("node0", "node1")}
    of |= {name: {"devices": [{"index": 0, "numerics": far}]} for name in ("node2", "node3")}
    verdicts = list(perf.numerics(healthy_hosts.replace(found, performance=of)))
    [between] = [v for v in verdicts if " - " in v.about]
    assert (between.about, between.state) == ("h200 - mi325x", "fail")
    same = dict.fromkeys(of, of["node0"])
    assert all(v.state == "ok" for v in perf.numerics(healthy_hosts.replace(found, performance=same)))


def test_the_program_answers_from_its_text_alone() -> None:
    text = inspect.getsource(perf_program)
    request = json.dumps({"program": "alive", "deadline_s": 60})
    boot = f"scope={{'__name__': 'x'}};exec(compile({text!r}, 'x', 'exec'), scope);scope['main']({request!r})"
    done = subprocess.run([sys.executable, "-I", "-"], input=boot, capture_output=True, text=True, timeout=400)
    document = json.loads(done.stdout)
    assert document["torch"] == torch.__version__
    assert len(document["devices"]) >= 1


def test_only_the_devices_a_host_was_given_compute_and_keep_their_numbers() -> None:
    found = healthy_hosts.checked(reports := healthy_hosts.reports(2))
    some = [replace(r, access=replace(r.access, gpus=(1,))) for r in reports]
    entry = InventoryHost("node0", some[0].access)
    checked = replace(found, cluster=build(some).cluster)
    shown = perf._shown(entry, HostCase(some[0], checked), "nvidia")
    assert [device.index for device in shown] == [1]
    answer = perf._numbered({"devices": [{"index": 0}]}, shown)
    assert answer == {"devices": [{"index": 1}], "chosen": True}
    everything = InventoryHost("node0", reports[0].access)
    assert perf._shown(everything, HostCase(reports[0], found), "nvidia") == ()


def test_hosts_compute_with_the_environment_that_their_ranks_get(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Answer:
        def receive(self, **_: Any) -> dict[str, Any]:
            return {"devices": []}

        def close(self) -> None:
            return None

    def converse(shell: Any, path: str, program: str, request: Any, **_: Any) -> Answer:
        asked.append(request)
        return Answer()

    monkeypatch.setattr(perf, "converse", converse)
    monkeypatch.setenv("FROM_HERE", "1")
    monkeypatch.delenv("NOWHERE", raising=False)
    env = {"NCCL_NVLS_ENABLE": "0", "FROM_HERE": None, "NOWHERE": None}
    found = healthy_hosts.reports(1)
    perf.measure([InventoryHost(found[0].name, Access(env=env))], healthy_hosts.checked(found), "perf", timeout_s=5)
    assert asked[0]["environment"] == {"NCCL_NVLS_ENABLE": "0", "FROM_HERE": "1"}
