"""For programs that train with torchft: `ProcessGroupHet` in place of `ProcessGroupGloo` or `ProcessGroupNCCL`.

torchft's groups join replicas that come and go, so no placement lists them: at each quorum the replicas tell each
other, through the quorum's store, which island they are in.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from torchft.process_group import ProcessGroupWrapper

from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.placement import PlacedIsland, Placement, current_placement
from hetctl.comm.group.builds import check_builds
from hetctl.comm.group.group import HetGroup
from hetctl.comm.operation.work import PrefixStore, Store


class ProcessGroupHet(ProcessGroupWrapper):  # type: ignore[misc]
    """A reconfigurable group across islands, for torchft's `Manager`.

    `timeout` is that of operations and of meeting. `island` names the island of this replica; by default it is that of
    this rank in `hetctl run`. Replicas that name one island are joined by its native library.
    """

    _pg: Any

    def __init__(self, timeout: timedelta = timedelta(seconds=60), island: str | None = None) -> None:
        super().__init__(timeout)
        self._island, self._name = island, ""

    def configure(self, store_addr: str, *args: Any, **more: Any) -> None:
        """Leave the group there was, and meet the replicas of another quorum. Raises ConfigError, or the store's."""
        self._name = store_addr.partition("/")[2]  # unique on the store, as torchft has it
        super().configure(store_addr, *args, **more)

    def _create_pg(self, store: Store, rank: int, world_size: int) -> Any:
        mine = dict(zip(("island", "host"), self._place(), strict=True))
        placement = _meet(PrefixStore("islands/", store), mine, rank, world_size)
        options = SimpleNamespace(
            store=store,
            group_rank=rank,
            group_size=world_size,
            timeout=self._timeout,
            group_id=self._name,
        )
        check_builds(store, rank, placement)
        # also inside one island: gloo ends neither what is pending nor threads, and says of nobody that they left
        return HetGroup(options, tuple(range(world_size)), placement)

    def _place(self) -> tuple[tuple[str, str, str], str]:
        """This replica's island (name, vendor, library) and host."""
        placement, rank = current_placement(), int(os.environ["RANK"])
        mine = placement.island_of_rank[rank]
        host = placement.hosts[rank] if rank < len(placement.hosts) else ""
        return (self._island or mine.name, mine.vendor, mine.torch_backend), host

    def abort(self, errored: bool = True) -> None:
        """End what is pending, here and at the peers, then the group's threads and connections."""
        group = self._pg
        super().abort(errored=errored)
        if group is not None:
            group.shutdown()

    def shutdown(self) -> None:
        """Finish what is queued, then end the group's threads and connections."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Of operations from now on, also in the group there is."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)

    def getBackendName(self) -> str:
        return "torchft-het"


def _meet(store: Store, mine: dict[str, Any], rank: int, size: int) -> Placement:
    """The placement of a quorum, made of what each replica says of itself. Raises ConfigError."""
    store.set(str(rank), json.dumps(mine))
    told = [json.loads(store.get(str(other))) for other in range(size)]
    islands: dict[str, PlacedIsland] = {}
    for other, said in enumerate(told):
        name, vendor, library = said["island"]
        known = islands.setdefault(name, PlacedIsland(name, vendor, library, ()))
        if (known.vendor, known.torch_backend) != (vendor, library):
            raise ConfigError(
                f"replicas {known.ranks[0]} and {other} both name island '{name}', one of {known.torch_backend} of "
                f"{known.vendor}, the other one of {library} of {vendor}",
                hint="name them apart: ProcessGroupHet(island=...)",
            )
        islands[name] = PlacedIsland(name, vendor, library, (*known.ranks, other))
    return Placement(tuple(islands.values()), hosts=tuple(said["host"] for said in told))
