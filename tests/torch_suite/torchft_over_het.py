"""A pytest plugin: torchft's tests ask for gloo and get `ProcessGroupHet`, each replica in an island by its rank.

Their replicas are threads of one process, so what a rank would be told by its environment is told by its rank here.
"""

from __future__ import annotations

import os
from typing import Any

from torchft import process_group

from hetctl.torchft import ProcessGroupHet


class Placed(ProcessGroupHet):
    """Of replicas that are in islands 0 | 1, 2 and so on."""

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        self._island = f"island{min(rank, 1)}"
        return super()._create_pg(store, rank, world_size)

    def _place(self) -> tuple[tuple[str, str, str], str]:
        return (str(self._island), "cpu", "gloo"), ""


if os.environ.get("HETCTL_AS_NCCL"):
    process_group.ProcessGroupGloo = Placed
