"""This machine as emulation sees it: its GPUs if an island finds enough of them, otherwise CPU processes."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hetctl.comm.contract.device_class import DeviceClass
from hetctl.comm.contract.emulate import Machine
from hetctl.comm.contract.facts import GpuFacts
from hetctl.comm.contract.natives import HOST, NATIVES, NativeName, native_of
from hetctl.comm.contract.units import count_of
from hetctl.discovery.devices import device_class
from hetctl.trainer.planning.hardware import not_in_the_table


def this_machine(counts: Sequence[int], *, on_host: int = 0) -> tuple[Machine, str]:
    """The machine with a device for each of the islands' `counts`, and a sentence on what they are.

    Where there are fewer GPUs, islands take turns on them: an island's own devices are always different ones. A CPU
    process slot has no memory of its own: it is unknown, and bounded by the whole. `on_host` of them stand beside GPUs.
    """
    memories, wanted = _gpu_memories() if counts else [], sum(counts)
    beside = f" and {count_of(on_host, 'CPU process', 'CPU processes')}" if on_host else ""
    name, memory = socket.gethostname(), psutil.virtual_memory().total
    if memories and len(memories) >= wanted:
        words = f"{wanted} of this machine's {count_of(len(memories), 'GPU')}{beside}"
        return _classed(Machine(name, _library(), tuple(memories), host_memory_bytes=memory), words)
    if memories and len(memories) >= max(counts):
        most = -(-wanted // len(memories))
        shares = tuple(memories[i % len(memories)] // most for i in range(wanted))
        each = "its GPU is shared" if len(memories) == 1 else f"its {len(memories)} GPUs are shared"
        words = f"{each} by up to {most} ranks each, so speeds say nothing of {count_of(wanted, 'GPU')}{beside}"
        return _classed(Machine(name, _library(), shares, host_memory_bytes=memory, gpus=len(memories)), words)
    cores = len(os.sched_getaffinity(0))
    why = "no GPU " + ("here" if counts else "asked for")
    why = f"only {count_of(len(memories), 'GPU')} here for {wanted} ranks" if memories else why
    wanted += on_host
    words = f"{count_of(wanted, 'CPU process', 'CPU processes')} share {count_of(cores, 'core')}"
    return Machine(name, "gloo", (memory // wanted,) * wanted, "cpu"), f"{why}, so {words}"


def _classed(machine: Machine, words: str) -> tuple[Machine, str]:
    """The machine with what its GPUs compute as, said where it is an estimate."""
    row = gpu_class()
    if row is None:
        return machine, words
    known = replace(machine, device_class=row.name, classes=(row,) if row.estimate else ())
    return known, f"{words}; {not_in_the_table(row)}" if row.estimate else words


def gpu_class() -> DeviceClass | None:
    """What this machine's first GPU computes as, an estimate where the hardware table lacks it; None: it has none."""
    memories = _gpu_memories()
    if not memories:
        return None
    name, properties = _devices().get_device_name(0), _devices().get_device_properties(0)
    target = getattr(properties, "gcnArchName", "").partition(":")[0]
    target = target or f"sm_{getattr(properties, 'major', 0)}{getattr(properties, 'minor', 0)}"
    vendors = [vendor for vendor, row in NATIVES.items() if row.driver_node and Path(row.driver_node).exists()]
    found = [
        device_class(GpuFacts(vendor, 0, name, architecture=target, memory_total_bytes=memories[0]))
        for vendor in vendors
    ]
    return next((row for row in found if not row.estimate), found[0] if found else None)


def _gpu_memories() -> list[int]:
    """Memory of each GPU torch can use, in bytes. Where no driver shows itself torch is not even imported."""
    devices = _devices()
    if devices is None:
        return []
    return [int(devices.get_device_properties(i).total_memory) for i in range(devices.device_count())]


def _devices() -> Any:
    """Torch's module for this machine's devices; None where it has none."""
    if not any(Path(row.driver_node).exists() for row in NATIVES.values() if row.driver_node):
        return None
    from hetctl.comm.operation.device import accelerator, module_of_type

    kind = accelerator()
    return kind and module_of_type(kind)


def _library() -> NativeName:
    """The native library of this machine's devices, as torch was built for them."""
    from hetctl.comm.operation.device import accelerator

    return native_of(device_type=accelerator() or HOST).library
