"""Publications: figures to seconds, halves that nobody chooses, files that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.model.shapes import SHAPES
from hetctl.trainer.planning.layout import Layout, ReplicaLayout, StageLayout
from hetctl.trainer.planning.publication import (
    Case,
    Figure,
    Publication,
    Source,
    read_publications,
    step_flops_per_token,
)

LAYOUT = Layout((ReplicaLayout((StageLayout("a100", 32, 8),), 16, 4),))
CASE = Case("one", "a100:8", LAYOUT, Figure(seconds=4.0))
TOY = Publication("toy", Source("t", "w", "l", "R"), (CASE,), "llama-8b", 2048)
FILE = """
schema_version: 1
name: Toy
source: {title: T, where: here, licence: none, read: M}
model: llama-8b
seq_len: 2048
devices: {toycard: {vendor: nvidia, peak: 100, memory: 80GiB, bandwidth: 1TB/s}}
cases:
- name: one
  cluster: toycard:8
  layout: {replicas: [{micro_batch_size: 8, micro_batches: 2, stages: [{pool: toycard, layers: 32, width: 8}]}]}
  measured: {tokens_per_s: 20000}
"""


@pytest.mark.parametrize(
    ("figure", "seconds"),
    [
        (Figure(seconds=4.0), 4.0),
        (Figure(samples_per_s=16.0), 4.0),
        (Figure(tokens_per_s=32768.0), 4.0),
        (Figure(tokens_per_s_per_gpu=4096.0), 4.0),
        (Figure(tflops_per_gpu=SHAPES["llama-8b"].token_flops(2048) * 64 * 2048 / 8 / 4.0 / 1e12), 4.0),
    ],
)
def test_every_figure_is_made_seconds_of_a_step(figure: Figure, seconds: float) -> None:
    assert TOY.seconds(replace(CASE, measured=figure)) == pytest.approx(seconds)


@pytest.mark.parametrize("figure", [Figure(), Figure(seconds=1.0, samples_per_s=2.0)])
def test_one_figure_is_needed(figure: Figure) -> None:
    with pytest.raises(ConfigError, match="one measured figure is needed"):
        TOY.seconds(replace(CASE, measured=figure))


def test_flops_are_those_of_the_publications_formulas() -> None:
    shape, s = SHAPES["gpt-7.5b"], 2048
    h, layers, v = shape.hidden, shape.layers, shape.vocab
    megatron = 96 * layers * h**2 * (1 + s / (6 * h)) + 6 * h * v  # arXiv 2104.04473, its head not computed again
    assert step_flops_per_token(shape, s, "recomputed") == pytest.approx(megatron)
    palm = 6 * (12 * layers * h**2 + v * h) + 12 * layers * h * s
    assert step_flops_per_token(shape, s, "full") == pytest.approx(palm)
    assert step_flops_per_token(shape, s, "causal") == pytest.approx(palm - 6 * layers * h * s)


def test_half_of_the_cases_are_held_out_whoever_asks() -> None:
    names = [replace(CASE, name=str(n)) for n in range(400)]
    held = [TOY.held_out(case) for case in names]
    assert 160 < sum(held) < 240
    assert held == [replace(TOY, model="llama-70b").held_out(case) for case in names]


def test_a_publication_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(FILE)
    [found] = read_publications(tmp_path)
    [case] = found.cases
    assert found.seconds(case) == pytest.approx(16 * 2048 / 20000)
    assert found.problem(case).pools[0].rates.peak_flops_per_s == 100e12


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("model: llama-8b", "model: llama-9b", "'llama-9b' is no model"),
        ("seq_len: 2048", "precision: bf16", "how many tokens a sample has is not said"),
        ("tokens_per_s: 20000", "hours: 3", "unknown key 'hours'"),
        (
            "cases:\n",
            "cases:\n- {name: one, cluster: 'a100:8', layout: {replicas: []}, measured: {seconds: 1}}\n",
            "two cases",
        ),
        ("read: M", "read: heard", "read"),
    ],
)
def test_what_a_file_must_not_say(tmp_path: Path, old: str, new: str, why: str) -> None:
    (tmp_path / "toy.yaml").write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=why):
        read_publications(tmp_path)


def test_folders_and_names_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no publication"):
        read_publications(tmp_path)
    (tmp_path / "toy.yaml").write_text(FILE)
    with pytest.raises(ConfigError, match="'toi' is no publication") as caught:
        read_publications(tmp_path, only="toi")
    assert "toy" in str(caught.value.hint)
