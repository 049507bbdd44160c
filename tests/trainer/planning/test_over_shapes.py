"""Estimates over shapes: right where the device adds up, never faster when larger, and as far off as they say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.over_shapes import KINDS, Estimated, features, leave_one_out, non_negative, serving
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.profile import ClassProfile, LayerSizes, Point, Profile, load_profile, save_profile
from hetctl.trainer.recipe import load_recipe

GRID = (("llama-160m", 1024), ("llama-1b", 4096), ("llama2-13b", 2048), ("llama-8b", 8192), ("llama-70b", 4096))
TRUE = {  # seconds of each feature on a device that adds up
    "block": (3e-4, 3e-15, 2e-15, 1e-13, 3e-12, 4e-12),
    "embedding": (5e-5, 1e-12, 2e-12),
    "head": (2e-4, 1e-14, 1e-12, 2e-12, 8e-11),
}


def measured(
    name: str, seq_len: int, *, device: str = "h200", slower: float = 1.0, floor: float = 0.0, tensor: int = 1
) -> ClassProfile:
    """As a device would measure it that adds up; nothing takes less than `floor`, which no sum can say."""
    sizes = LayerSizes.of(SHAPES[name])

    def point(kind: str, samples: int) -> Point:
        row = features(kind, sizes, seq_len, samples, tensor)  # type: ignore[arg-type]
        seconds = max(floor, slower * float(row @ np.array(TRUE[kind])))
        return Point(samples, seconds, 2 * seconds)

    points = {kind: tuple(point(kind, n) for n in (1, 4)) for kind in KINDS}
    return ClassProfile(device, name, seq_len, **points, update_s=1e-11 * slower, tensor=tensor, sizes=sizes)


def estimate(entries: list[ClassProfile], name: str, seq_len: int) -> Estimated:
    found = serving(Profile(tuple(entries)), SHAPES[name], seq_len)[0]
    assert isinstance(found, Estimated)
    return found


def grid(floor: float = 0.0) -> list[ClassProfile]:
    return [measured(*row, floor=floor) for row in GRID]


@pytest.mark.parametrize(("name", "seq_len"), [("llama2-7b", 4096), ("qwen2-7b", 2048), ("gpt-7.5b", 2048)])
@pytest.mark.parametrize("kind", KINDS)
def test_where_a_device_adds_up_any_shape_is_told(kind: str, name: str, seq_len: int) -> None:
    found, true = estimate(grid(), name, seq_len), measured(name, seq_len)
    for samples in (1, 3, 16):
        assert found.at(kind, samples) == pytest.approx(true.at(kind, samples), rel=1e-6)  # type: ignore[arg-type]
    assert (found.shapes, found.error, found.worst) == pytest.approx((5, 0.0, 0.0), abs=1e-6)
    assert found.update_s == pytest.approx(1e-11)
    assert "from 5 measured shapes, 0 % off them leave-one-out" in found.how


def test_parts_of_tensor_groups_are_told_from_whole_layers() -> None:
    found = {e.tensor: e for e in serving(Profile(tuple(grid())), SHAPES["llama2-7b"], 4096)}
    assert list(found) == [1, 2, 4, 8]
    for tensor, entry in found.items():
        true = measured("llama2-7b", 4096, tensor=tensor)
        assert entry.at("block", 2) == pytest.approx(true.at("block", 2), rel=1e-6)
        assert entry.at("head", 2) == pytest.approx(true.at("head", 2), rel=1e-6)


def test_what_was_measured_of_just_this_is_taken_as_it_is() -> None:
    odd = measured("llama-8b", 2048, slower=3.0)
    assert serving(Profile((*grid(), odd)), SHAPES["llama-8b"], 2048) == (odd,)
    renamed = replace(SHAPES["llama-8b"], name="mine")
    assert serving(Profile((*grid(), odd)), renamed, 2048) == (odd,), "the same sizes by another name"
    other = replace(odd, model="mine", sizes=LayerSizes.of(SHAPES["llama-3b"]))
    [found, *_] = serving(Profile((*grid(), other)), replace(SHAPES["llama-8b"], name="mine"), 2048)
    assert isinstance(found, Estimated), "another model of the same name"


def test_the_error_said_is_the_error() -> None:
    """Each shape in turn is asked of a profile that lacks it, and compared with what was measured."""
    entries = grid(floor=4e-3)
    off = []
    for left_out in entries:
        others = [e for e in entries if e is not left_out]
        told = estimate(others, left_out.model, left_out.seq_len)
        sums = [
            sum(told.at(kind, p.samples)) / (p.forward_s + p.backward_s) - 1
            for kind in ("block", "head")
            for p in getattr(left_out, kind)
        ]
        off.append(mean(map(abs, sums)))
    found = estimate(entries, "llama2-7b", 4096)
    assert found.error == pytest.approx(mean(off))
    assert found.worst == pytest.approx(max(off))
    assert max(off) > 0.02, "nothing was off: the test shows nothing"
    assert list(leave_one_out(entries).values()) == pytest.approx(off)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), floor=st.sampled_from([0.0, 1e-3, 2e-2]))
def test_nothing_larger_is_faster(data: st.DataObject, floor: float) -> None:
    shape = SHAPES["llama2-7b"]
    factor = data.draw(st.integers(2, 4))
    key = data.draw(st.sampled_from(["hidden", "intermediate", "vocab", "heads", "seq_len", "samples"]))
    asked = {"seq_len": data.draw(st.sampled_from([256, 4096, 65536])), "samples": 1}
    larger = {**asked, key: factor * asked[key]} if key in asked else asked
    grown = shape if key in asked else _grown(shape, key, factor)
    profile = Profile(tuple(grid(floor)))
    small, large = (serving(profile, s, a["seq_len"])[0] for s, a in ((shape, asked), (grown, larger)))
    for kind in KINDS:
        before, after = small.at(kind, asked["samples"]), large.at(kind, larger["samples"])
        assert all(b <= a * (1 + 1e-9) for b, a in zip(before, after, strict=True))


def _grown(shape: ModelShape, key: str, factor: int) -> ModelShape:
    return replace(shape, **{key: factor * getattr(shape, key)}, name="grown")


def test_what_is_beyond_the_measured_range_is_called_so() -> None:
    found = estimate(grid(), "llama2-7b", 16384)
    assert found.beyond == ("length (16384, measured 1024 to 8192)",)
    assert "extrapolated in length (16384, measured 1024 to 8192) from 5 measured shapes" in found.how
    assert estimate(grid(), "qwen2-72b", 4096).beyond == ("vocab (152064, measured 32000 to 128256)",)


def test_two_shapes_tell_of_no_third() -> None:
    assert serving(Profile(tuple(grid()[:2])), SHAPES["llama-70b"], 4096) == ()


def test_each_class_and_speed_is_told_by_its_own() -> None:
    slow = [replace(measured(*row, slower=2.0), speed=0.5) for row in GRID]
    other = [measured(*row, device="mi325x", slower=3.0) for row in GRID]
    found = serving(Profile((*grid(), *slow, *other)), SHAPES["llama2-7b"], 4096)
    seconds = {(e.device_class, e.speed): e.at("block", 4)[0] for e in found if e.tensor == 1}
    base = seconds["h200", 1.0]
    assert seconds["h200", 0.5] == pytest.approx(2 * base)
    assert seconds["mi325x", 1.0] == pytest.approx(3 * base)


def test_older_files_say_no_sizes_and_serve_by_their_models_names(tmp_path: Path) -> None:
    old = [replace(e, sizes=None) for e in grid()]
    save_profile(tmp_path / "p.yaml", Profile(tuple(old)))
    again = load_profile(tmp_path / "p.yaml")
    assert serving(again, SHAPES["llama-8b"], 8192) == (old[3],)
    assert estimate(list(again.classes), "llama2-7b", 4096).shapes == 5
    unknown = [replace(e, model=f"unknown-{i}") for i, e in enumerate(old)]
    assert serving(Profile(tuple(unknown)), SHAPES["llama2-7b"], 4096) == ()
    assert Profile(tuple(old)).with_class(grid()[0]).classes == (*old[1:], grid()[0]), "the older one is replaced"


def test_impossible_sizes_and_seconds_are_refused_and_none_at_all_is_no_zero(tmp_path: Path) -> None:
    [first, *others] = grid()
    assert first.sizes is not None
    nothing = replace(first, embedding=(Point(1, 0.0, 0.0),))
    assert estimate([nothing, *others], "llama2-7b", 4096).at("embedding", 1)[0] > 0
    bad = [
        (replace(first, sizes=replace(first.sizes, hidden=0)), "sizes of at least one"),
        (replace(first, head=(Point(1, float("inf"), 1.0),)), "finite seconds of head"),
    ]
    for entry, said in bad:
        save_profile(tmp_path / "p.yaml", Profile((entry,)))
        with pytest.raises(ConfigError, match=said):
            load_profile(tmp_path / "p.yaml")


def test_coefficients_are_never_negative() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(rows, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(rows, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


def plan_of(*entries: ClassProfile, model: str = "llama2-7b") -> Plan:
    cluster = describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES)
    sets = [("model.name", model), ("model.seq_len", 4096), ("batch.global_batch", 16), ("parallelism.pipeline", 2)]
    more = [("parallelism.order", "given"), ("batch.micro_batch_size", 1)]
    return make_plan(cluster, load_recipe(None, sets + more), profile=Profile(entries))


def test_a_plan_of_another_model_stands_on_estimates_and_says_so() -> None:
    slow = [measured(*row, device="mi325x", slower=2.0) for row in GRID]
    plan = plan_of(*grid(), *slow)
    true = plan_of(measured("llama2-7b", 4096), measured("llama2-7b", 4096, device="mi325x", slower=2.0))
    assert plan.predicted is not None
    assert true.predicted is not None
    assert (plan.predicted.basis, true.predicted.basis) == ("interpolated", "measured")
    assert plan.replicas == true.replicas
    assert plan.predicted.step_time_s == pytest.approx(true.predicted.step_time_s, rel=1e-6)
    how = "interpolated from 5 measured shapes, 0 % off them leave-one-out (at worst 0 %)."
    assert f"h200 at llama2-7b, 4096 tokens: {how}" in plan.reasons
    assert f"mi325x at llama2-7b, 4096 tokens: {how}" in plan.reasons
    partly = plan_of(*grid())
    assert partly.predicted is not None
    assert partly.predicted.basis == "table"
    assert any("says nothing of mi325x" in reason for reason in partly.reasons)
