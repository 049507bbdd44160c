"""Who commits a checkpoint: one rank of the run, or one of each host where hosts share no folder."""

from __future__ import annotations

import pytest

from hetctl.comm.contract import variables
from hetctl.comm.contract.placement import Placement
from hetctl.trainer.checkpoint import per_host


@pytest.mark.parametrize(("spread", "leaders"), [("", [0]), ("1", [0, 2])])
def test_one_rank_leads_also_where_ranks_of_two_vendors_count_from_zero(
    spread: str, leaders: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.SPREAD, spread)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(per_host, "current_placement", lambda: Placement((), hosts=("box", "box", "node", "node")))
    found = []
    for rank in range(4):
        monkeypatch.setattr(per_host.dist, "get_rank", lambda rank=rank: rank)
        found += [rank] if per_host.leads() else []
    assert found == leaders
