"""What tells one base of adapters from another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hetctl.trainer.checkpoint.base import ENDS_BYTES, base_digest
from hetctl.trainer.model.adapters import Adapters
from tests.trainer.loop.test_parity import ADAPTED
from tests.trainer.parity import SHAPE


def test_weights_their_config_and_alpha_tell_bases_apart_and_ranks_places_do_not(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3 * ENDS_BYTES))
    one = base_digest(ADAPTED, tmp_path / "a", seed=0)
    assert one == base_digest(ADAPTED, tmp_path / "b", seed=1)
    assert one != base_digest(replace(ADAPTED, adapters=Adapters(3, 9.0, ("q_proj",))), tmp_path / "a", seed=0)
    assert one != base_digest(replace(ADAPTED, adapters=Adapters(3, 6.0, ("q_proj",), True)), tmp_path / "a", seed=0)
    (tmp_path / "b/model.safetensors").write_bytes(bytes(3 * ENDS_BYTES - 1) + b"1")
    assert one != base_digest(ADAPTED, tmp_path / "b", seed=0)
    (tmp_path / "a/config.json").write_text('{"rope_theta": 5}')
    assert one != base_digest(ADAPTED, tmp_path / "a", seed=0)


def test_weights_that_are_kept_otherwise_are_another_base() -> None:
    assert ADAPTED.adapters is not None
    kept = [replace(ADAPTED, adapters=replace(ADAPTED.adapters, quantised=kind)) for kind in (None, "int8", "nf4")]
    assert len({base_digest(shape, None, seed=0) for shape in kept}) == 3


def test_random_weights_are_told_by_their_seed() -> None:
    assert (
        base_digest(ADAPTED, None, seed=0) == base_digest(ADAPTED, None, seed=0) != base_digest(ADAPTED, None, seed=1)
    )
    assert base_digest(SHAPE, None, seed=0) is None
