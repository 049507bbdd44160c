"""A program that ends without a word to its process group ends its run well; `tests.faults.exits` tries more."""

from __future__ import annotations

import pytest

from tests.faults.exits import WAYS, ended, two_hosts
from tests.rigs import netns

WHY_NOT = netns.unavailable()


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_each_way_of_ending_has_its_exit_code_and_says_nothing_odd(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("e")
    with two_hosts(folder) as rig:
        for number, way in enumerate(WAYS):
            one = ended(rig, folder, way, number)
            assert one.well, one
