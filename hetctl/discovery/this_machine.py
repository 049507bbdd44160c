"""This machine as emulation sees it: its GPUs if an island finds enough of them, otherwise CPU processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from hetctl.comm.contract.emulate import Machine
from hetctl.comm.contract.natives import NATIVES
from hetctl.trainer.planning.hardware import class_of_product

GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")


def this_machine(counts: Sequence[int]) -> tuple[Machine, str]:
    """The machine with a device for each of the islands' `counts`, and a sentence on what they are.

    Where there are fewer GPUs, islands take turns on them: an island's own devices are always different ones. A CPU
    process slot has no memory of its own: it is unknown, and bounded by the whole.
    """
    memories, wanted = _gpu_memories(), sum(counts)
    name = socket.gethostname()
    if memories and len(memories) >= wanted:
        return Machine(name, "nccl", tuple(memories), gpu_class()), f"{wanted} of this machine's {len(memories)} GPUs"
    if memories and len(memories) >= max(counts):
        most = -(-wanted // len(memories))
        shares = tuple(memories[i % len(memories)] // most for i in range(wanted))
        each = "its GPU is shared" if len(memories) == 1 else f"its {len(memories)} GPUs are shared"
        words = f"{each} by up to {most} ranks each, so speeds say nothing of {wanted} GPUs"
        return Machine(name, "nccl", shares, gpu_class(), gpus=len(memories)), words
    cores = len(os.sched_getaffinity(0))
    why = "no GPU here" if not memories else f"only {len(memories)} GPUs here for {wanted} ranks"
    share = psutil.virtual_memory().total // wanted
    return Machine(name, "gloo", (share,) * wanted, "cpu"), f"{why}, so {wanted} CPU processes share {cores} cores"


def gpu_class() -> str | None:
    """The device class of this machine's first GPU; None when it has none or the hardware table does not know it."""
    if not _gpu_memories():
        return None
    import torch

    product = torch.cuda.get_device_name(0)
    rows = (class_of_product(vendor, product) for vendor in NATIVES)
    return next((row.name for row in rows if row is not None), None)


def _gpu_memories() -> list[int]:
    """Memory of each GPU torch can use, in bytes. Where no driver shows itself torch is not even imported."""
    if not any(Path(node).exists() for node in GPU_NODES):
        return []
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [int(torch.cuda.get_device_properties(i).total_memory) for i in range(count)]
