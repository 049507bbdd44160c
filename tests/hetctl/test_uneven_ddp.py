"""Ranks of unequal speed in a DDP program: samples by speed, gradients those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from hetctl.comm.contract import variables
from hetctl.comm.contract.emulate import Machine, describe_cluster, label_machine, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.data import Sampler, split
from hetctl.ddp import weigh
from hetctl.runs.program import rank_speeds
from hetctl.trainer.planning.hardware import CLASSES
from tests.comm.spawn import on_islands
from tests.hetctl.process import hetctl

BATCH, LENGTH, EPOCHS = 8, 6, 2
SPEEDS = {(1, 1): (3.0, 1.0), (2, 1): (1.0, 2.0, 4.0), (1, 1, 1): (1.0, 1.0, 5.0)}


@pytest.mark.parametrize(
    ("samples", "speeds", "counts"),
    [(8, (3, 1), [6, 2]), (8, (1, 1), [4, 4]), (10, (1, 1, 1), [4, 3, 3]), (5, (100, 1), [4, 1]), (7, (2, 1), [5, 2])],
)
def test_the_slowest_ends_as_soon_as_it_can(samples: int, speeds: tuple[float, ...], counts: list[int]) -> None:
    assert split(samples, speeds) == counts


def test_no_other_split_is_faster() -> None:
    speeds = (1.0, 1.7, 4.1)
    for samples in range(3, 25):
        ways = [(a, b, samples - a - b) for a in range(1, samples) for b in range(1, samples - a)]
        best = min(max(n / s for n, s in zip(way, speeds, strict=True)) for way in ways)
        found = split(samples, speeds)
        assert sum(found) == samples
        assert max(n / s for n, s in zip(found, speeds, strict=True)) == best


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_all_ranks_together_take_what_one_process_takes(shuffle: bool, drop_last: bool) -> None:
    data = range(37)
    about: dict[str, Any] = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last, "batch_size": BATCH}
    ranks = [Sampler(data, 3, rank, speeds=(1, 2, 4), **about) for rank in range(3)]
    alone = Sampler(data, 1, 0, **about)
    for epoch in range(2):
        for one in (alone, *ranks):
            one.set_epoch(epoch)
        steps = [list(DataLoader(data, one.batch_size, sampler=one, collate_fn=list)) for one in ranks]  # type: ignore[arg-type]
        assert [len(one) for one in ranks] == [sum(map(len, mine)) for mine in steps]
        assert {len(mine) for mine in steps} == {37 // BATCH + (not drop_last)}
        together = [[*chain(*parts)] for parts in zip(*steps, strict=True)]
        assert together == list(DataLoader(data, BATCH, sampler=alone, collate_fn=list))  # type: ignore[arg-type]
        assert drop_last or set(range(37)) == {n for step in together for n in step}


def test_what_cannot_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="2 samples a step cannot be shared by 3 ranks"):
        Sampler(range(9), 3, 0, batch_size=2, speeds=(1, 1, 1))
    with pytest.raises(ConfigError, match="2 speeds are given for 3 ranks"):
        Sampler(range(9), 3, 0, batch_size=6, speeds=(1, 1))
    monkeypatch.delenv(variables.SPEEDS, raising=False)
    with pytest.warns(UserWarning, match="equally many"):
        assert Sampler(range(9), 3, 0, batch_size=6).every == [2, 2, 2]
    monkeypatch.setenv(variables.SPEEDS, "2.5,1.25")
    assert Sampler(range(9), 2, 0, batch_size=6).every == [4, 2]


def trained(rank: int, speeds: tuple[float, ...] | None, by: str) -> list[Tensor]:
    """The weights after some epochs, of `by` 'samples', of 'tokens' that are unlike many in each, or of neither."""
    torch.manual_seed(0)
    inputs, bears = torch.randn(37, LENGTH, 5, dtype=torch.float64), torch.rand(37, LENGTH) < 0.5
    bears[:, 0] = True
    data = TensorDataset(inputs, inputs.sum(-1).tanh(), bears)
    model: Any = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    alone = speeds is None
    sampler = Sampler(data, *((1, 0) if alone else ()), seed=1, batch_size=BATCH, speeds=speeds)
    if not alone:
        model = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    weights = None if alone or by == "neither" else weigh(model, sampler if by == "samples" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, wanted, counts in DataLoader(data, sampler.batch_size, sampler=sampler):
            if weights is not None and by == "tokens":
                weights.count(int(counts.sum()))
            off = (model(x).squeeze(-1) - wanted) ** 2
            (off[counts].mean() if by == "tokens" else off.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def deviation(sizes: tuple[int, ...], by: str) -> float:
    wanted = trained(0, None, by)
    found = on_islands(sizes, trained, SPEEDS[sizes], by)
    return max(float((a - b).abs().max()) for mine in found for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("sizes", list(SPEEDS))
def test_gradients_are_those_of_one_process(sizes: tuple[int, ...], by: str) -> None:
    assert deviation(sizes, by) < 1e-12


def test_without_weights_they_are_not() -> None:
    assert deviation((1, 1), "neither") > 1e-4


def uncounted(rank: int) -> str:
    model = DistributedDataParallel(nn.Linear(2, 2))
    weigh(model)
    try:
        model(torch.ones(1, 2)).sum().backward()
    except Exception as error:
        return str(error)
    return ""


def test_a_step_that_counts_nothing_is_named() -> None:
    assert all("nothing was counted before backward" in said for said in on_islands((1, 1), uncounted))


def test_ranks_are_told_the_speeds_of_their_devices(tmp_path: Path) -> None:
    described = describe_cluster(parse_spec("h100:2,v100:1@0.5", CLASSES), CLASSES)
    fast, same, slow = rank_speeds(described, None)
    assert fast == same
    assert fast / slow == pytest.approx(2 * CLASSES["h100"].sustained_in("fp16") / CLASSES["v100"].sustained_in("fp16"))
    labels = label_machine(parse_spec("h200:1,mi325x:1@0.25", CLASSES), Machine("here", "gloo", (2**32, 2**32)))
    fast, slow = rank_speeds(labels, None)
    assert fast / slow == pytest.approx(4), "labels are this machine's devices"
    program = tmp_path / "program.py"
    program.write_text("import os; print('told', os.environ['HETCTL_SPEEDS'])\n")
    said = hetctl("run", "--emulate", "h200:1,mi325x:1@0.25", "--", "python", str(program), cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert "told 4,1" in said.stdout


def test_of_a_plan_the_samples_that_it_gives_to_each_rank(tmp_path: Path) -> None:
    words = ("--emulate", "h200:1,mi325x:1@0.25", "--global-batch", "10", "--model", "demo")
    pins = ("--set", "parallelism.data=2", "--set", "batch.micro_batch_size=1")
    made = hetctl("plan", *words, *pins, "-o", "plan.yaml", "--json", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    counts = [r["stages"][0]["micro_batches"] for r in json.loads(made.stdout)["replicas"]]
    program = tmp_path / "program.py"
    program.write_text("import os; print('told', os.environ['HETCTL_SPEEDS'])\n")
    said = hetctl("run", "--plan", "plan.yaml", "--", "python", str(program), cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert f"told {max(counts) / min(counts):g},1" in said.stdout


ACCELERATED = """
import torch
from accelerate import Accelerator
from hetctl.data import Sampler
from hetctl.ddp import weigh
from torch.utils.data import DataLoader, TensorDataset

told = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(37, 5, dtype=torch.float64)
data = TensorDataset(inputs, inputs.sum(-1, keepdim=True).tanh())
model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
sampler = Sampler(data, told.num_processes, told.process_index, batch_size=8, seed=1)
model, optimizer = told.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if told.num_processes > 1:
    weigh(model, sampler)
for x, wanted in DataLoader(data, sampler.batch_size, sampler=sampler):
    told.backward(((model(x) - wanted) ** 2).mean())
    optimizer.step()
    optimizer.zero_grad()
ends = sum(float(p.detach().abs().sum()) for p in model.parameters())
print(f"ranks {told.num_processes} takes {sampler.batch_size} ends {ends!r}")
told.end_training()
"""


def test_accelerate_does_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    program = tmp_path / "program.py"
    program.write_text(ACCELERATED)
    alone = subprocess.run([sys.executable, str(program)], text=True, capture_output=True, check=True)
    words = ("run", "--emulate", "h200:1,mi325x:1@0.25", "--as-nccl", "--", "python", str(program))
    said = hetctl(*words, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    wanted = float(alone.stdout.split()[-1])
    ends = [line.split() for line in said.stdout.splitlines() if " ends " in line]
    assert [(e[2], e[4]) for e in sorted(ends)] == [("2", "7"), ("2", "1")]
    assert [float(e[-1]) for e in ends] == pytest.approx([wanted] * 2, rel=1e-12)
