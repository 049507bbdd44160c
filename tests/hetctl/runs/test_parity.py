"""Which first losses count as those of one process, and which do not."""

from hetctl.runs.parity import held_against


def test_losses_of_a_run_are_held_against_one_process_by_its_precision() -> None:
    wanted = [5.0, 4.0]
    near, off, broken = [5.00005, 4.0], [5.0, 4.01], [5.0, None]
    assert held_against(near, wanted, "fp32").equal
    assert not held_against(near, wanted, "fp64").equal
    assert not held_against(off, wanted, "fp32").equal
    assert held_against(off, wanted, "bf16").equal
    for losses in (broken, [5.0], []):
        made = held_against(losses, wanted, "bf16")
        assert (made.equal, made.worst_deviation) == (False, None)
