"""profile.yaml: between, before and beyond its points; what it must refuse; what a plan makes of it."""

from pathlib import Path

import pytest

from hetctl.comm.emulate import describe_cluster, parse_spec
from hetctl.comm.errors import ConfigError
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.planner import make_plan
from hetctl.trainer.planning.profile import ClassProfile, Point, Profile, load_profile, save_profile
from hetctl.trainer.recipe import load_recipe


def entry(name: str, *, block: float = 1.0, seq_len: int = 128) -> ClassProfile:
    points = (Point(1, block, 2 * block), Point(4, 2.5 * block, 5 * block))
    return ClassProfile(name, "demo", seq_len, points, (Point(1, 0.001, 0.001),), (Point(1, 0.01, 0.02),))


def test_times_are_linear_between_points_and_beyond_them() -> None:
    cpu = entry("cpu")
    assert cpu.at("block", 1) == (1.0, 2.0)
    assert cpu.at("block", 2) == pytest.approx((1.5, 3.0))
    assert cpu.at("block", 8) == pytest.approx((4.5, 9.0))
    assert cpu.at("embedding", 3) == pytest.approx((0.003, 0.003))


def test_files_come_back_and_newer_measurements_replace_older(tmp_path: Path) -> None:
    profile = Profile((entry("cpu"),)).with_class(entry("h200")).with_class(entry("cpu", block=3.0))
    save_profile(tmp_path / "p.yaml", profile)
    again = load_profile(tmp_path / "p.yaml")
    assert {c.device_class: c.block[0].forward_s for c in again.classes} == {"h200": 1.0, "cpu": 3.0}


def test_descending_points_are_refused(tmp_path: Path) -> None:
    bad = ClassProfile("cpu", "demo", 128, (Point(4, 1, 1), Point(1, 1, 1)), (Point(1, 1, 1),), (Point(1, 1, 1),))
    save_profile(tmp_path / "p.yaml", Profile((bad,)))
    with pytest.raises(ConfigError, match="ascending points of block"):
        load_profile(tmp_path / "p.yaml")


def test_measured_classes_decide_the_split_and_missing_ones_are_named() -> None:
    cluster = describe_cluster(parse_spec("h200:1,mi325x:1", CLASSES), CLASSES)
    sets = [("parallelism.pipeline", 2), ("parallelism.order", "given"), ("batch.micro_batch_size", 1)]
    recipe = load_recipe(None, sets)
    both = Profile((entry("h200", block=1.0), entry("mi325x", block=3.0)))
    plan = make_plan(cluster, recipe, profile=both)
    assert plan.predicted is not None
    assert plan.predicted.basis == "measured"
    assert [s.layers for s in plan.replicas[0].stages] == [(0, 6), (6, 8)]
    partly = make_plan(cluster, recipe, profile=Profile((entry("h200"),)))
    assert partly.predicted is not None
    assert partly.predicted.basis == "table"
    assert any("says nothing of mi325x" in reason for reason in partly.reasons)
