"""A toy transport for tests: messages as values in the group's store, one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from hetctl.comm.bridge.bridge import Bridge, LaneKey, Message
from hetctl.comm.bridge.transports import Making


class StoreLane:
    """One stream of messages; the store keeps their order by number."""

    moved, busy = 0.0, False

    def __init__(self, bridge: Bridge, key: LaneKey) -> None:
        self._bridge, self._key, self._count = bridge, key, 0
        self._name = f"toy/{key.link_name(bridge.rank)}/{key.wire_tag}"
        self._thread = ThreadPoolExecutor(1)

    def put(self, message: Message) -> None:
        self._thread.submit(self._move, message, f"{self._name}/{self._count}")
        self._count += 1

    def _move(self, message: Message, name: str) -> None:
        with self._bridge.store.waiting() as store:
            if self._key.sending:
                store.set(name, message.octets.numpy().tobytes())
            else:
                came = torch.frombuffer(bytearray(store.get(name)), dtype=message.data.dtype)
                if message.after is not None:  # what is sent from this memory goes first
                    assert message.after.outgoing is not None
                    message.after.outgoing.behind(message.octets.numel(), 30)
                (message.combine or torch.Tensor.copy_)(message.data, came)
        self._bridge.end(message)

    def rest(self, *, seconds: float) -> None:
        self._thread.submit(lambda: None).result(seconds)

    def close(self, *, seconds: float) -> None:
        self._thread.shutdown(wait=False)


class StoreTransport:
    def lane(self, bridge: Bridge, key: LaneKey) -> StoreLane:
        return StoreLane(bridge, key)

    def kill(self) -> None: ...

    def close(self) -> None: ...


def make(making: Making) -> StoreTransport:
    return StoreTransport()
