"""What arrives is what was sent, or an error says which rail, peer and chunk: trailers always, checksums on demand."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hetctl.comm.bridge import forwarded
from hetctl.comm.bridge.staging import TRAILER_BYTES, TrailerMismatch, seal, unseal
from hetctl.comm.contract.placement import PlacedBridge
from tests.comm.spawn import on_islands


def slot_with(payload: bytes, *, operation: int = 7, chunk: int = 2, checked: bool = True) -> torch.Tensor:
    slot = torch.zeros(len(payload) + TRAILER_BYTES, dtype=torch.uint8)
    slot[: len(payload)] = torch.tensor(list(payload), dtype=torch.uint8)
    seal(slot, (operation, chunk), len(payload), checked=checked)
    return slot


def test_a_sealed_slot_opens_as_what_it_is() -> None:
    slot = slot_with(b"weights")
    unseal(slot, (7, 2), 7, checked=True)
    assert bytes(slot[:7].tolist()) == b"weights"


@pytest.mark.parametrize(("operation", "chunk"), [(6, 2), (7, 3)], ids=["stale", "swapped"])
def test_another_chunk_than_the_expected_one_is_refused(operation: int, chunk: int) -> None:
    with pytest.raises(TrailerMismatch, match="expected chunk 2 of message 7"):
        unseal(slot_with(b"weights", operation=operation, chunk=chunk), (7, 2), 7, checked=False)


def test_one_flipped_bit_is_seen_only_where_checksums_are_on() -> None:
    slot = slot_with(b"weights")
    slot[3] ^= 1
    unseal(slot, (7, 2), 7, checked=False)
    with pytest.raises(TrailerMismatch, match="other bytes than were sent"):
        unseal(slot, (7, 2), 7, checked=True)


def flipped(rank: int) -> str:
    """The error of a message of two chunks, the second of which changes on its way."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    data = torch.arange(9 * 2**20, dtype=torch.uint8)

    def harmful(slot: torch.Tensor, position: tuple[int, int], length: int, *, checked: bool) -> None:
        seal(slot, position, length, checked=checked)
        if position[1] == 1:
            slot[100] ^= 1

    if rank == 0:
        forwarded.seal = harmful
    try:
        dist.send(data, 1, group=group) if rank == 0 else dist.recv(data, 0, group=group)
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(("transport", "rail"), [("tcp", "rail 0"), ("shm", "shared-memory ring")])
def test_a_flip_on_the_way_names_rail_peer_and_chunk_to_both_ends(transport: str, rail: str) -> None:
    bridges = (PlacedBridge(("island0", "island1"), transport),)  # type: ignore[arg-type]
    for text in on_islands((1, 1), flipped, broken=True, verify_bridge=True, bridges=bridges):
        assert rail in text
        assert "receiving from rank 0 on host0" in text
        assert "chunk 1 of message 0 arrived with other bytes" in text
