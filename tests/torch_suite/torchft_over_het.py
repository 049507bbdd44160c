"""A pytest plugin: torchft's tests ask for gloo and get `ProcessGroupHet`, each replica in an island by its rank.

Their replicas are threads of one process, so what a rank would be told by its environment is told by its rank here.
"""

from __future__ import annotations

import os
from typing import Any

if os.environ.get("HETCTL_AS_NCCL"):
    from torchft import process_group

    from hetctl.torchft import ProcessGroupHet

    class _Placed(ProcessGroupHet):
        def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
            self._named = f"island{min(rank, 1)}"  # 0 | 1, 2
            return super()._create_pg(store, rank, world_size)

        def _place(self) -> tuple[tuple[str, str, str], str]:
            return (self._named, "cpu", "gloo"), ""

    process_group.ProcessGroupGloo = _Placed
