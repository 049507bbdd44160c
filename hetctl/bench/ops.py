"""`hetctl bench ops`: measure this machine's device and keep it in a profile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from hetctl.bench.ranks import run_ranks
from hetctl.comm.contract import variables
from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.device_class import DeviceClass, Precision
from hetctl.comm.contract.emulate import SpecIsland, SpecPart, label_machine
from hetctl.comm.contract.errors import ConfigError, Undetermined, WorkFailed
from hetctl.comm.contract.files import alone_in, refuse_unwritable
from hetctl.comm.contract.natives import HOST, native_of
from hetctl.comm.contract.units import show_seconds
from hetctl.comm.contract.values import decode, encode
from hetctl.console import Sink
from hetctl.discovery.this_machine import gpu_class, this_machine
from hetctl.launcher.supervisor.launch import Launch
from hetctl.trainer.bench.grid import ClassToMeasure, ShapeToMeasure
from hetctl.trainer.model.config import find_shape
from hetctl.trainer.model.tensor_cuts import cannot_cut
from hetctl.trainer.planning.hardware import CLASSES
from hetctl.trainer.planning.profile import BridgeProfile, ClassProfile, Profile, SumPoint, load_profile, save_profile
from hetctl.trainer.recipe import usual_length


def bench_ops(
    *,
    model: str,
    seq_len: int | None,
    samples: str,
    device_class: str | None,
    sink: Sink,
    speed: float = 1.0,
    tensor: int = 1,
    precision: Precision | None = None,
) -> ClassProfile:
    """Measure each kind of layer on this machine's first GPU, or on its CPU, said aloud. Raises ConfigError."""
    import torch

    from hetctl.comm.operation.device import accelerator
    from hetctl.trainer.bench.ops import measure_class

    what = asked_shape(model, seq_len, samples)
    shape, length = what.shape, what.seq_len
    kind = accelerator()
    on_gpu = kind is not None
    own = gpu_class() if on_gpu else CLASSES["cpu"]
    name = device_class or (own.name if own else None)
    if name is None:
        raise Undetermined("nothing says what this GPU is", hint="say what to call it with --class")
    row = CLASSES.get(name, own) if on_gpu else own
    if precision and row and not row.computes(precision):
        raise ConfigError(f"--precision {precision} is not possible: {row.name} cannot multiply {precision}")
    if not on_gpu:
        torch.set_num_threads(1)  # as a rank that shares the machine has it
    if why := cannot_cut(shape, tensor):
        raise ConfigError(why, hint="leave --tensor out, or give another degree")
    if precision == ("bf16" if on_gpu else "fp32"):
        precision = None  # as it is measured unasked
    held = "" if speed == 1.0 else f" at {speed:g} of its speed"
    part = "" if tensor == 1 else f", one of a tensor group of {tensor}"
    part += f", in {precision}" if precision else ""
    sink.say(
        f"measuring '{shape.name}' at {length} tokens on {'a GPU' if on_gpu else 'the CPU'}{held}, as {name}{part}"
    )
    if tensor > 1:
        if own is not None and speed == 1.0 and (group := _tensor_group(own, tensor)) is not None:
            return _of_group(group, ClassToMeasure(name, (what,), tensor, precision, tensor), sink)
        sink.warn(
            "its sums are over one rank alone, so that nobody is waited for: there are not devices for all of them"
        )
    return measure_class(
        shape,
        length,
        device_class=name,
        device=torch.device(HOST if kind is None else f"{kind}:0"),
        samples=what.samples,
        speed=speed,
        tensor=tensor,
        precision=precision,
    )


def _tensor_group(row: DeviceClass, ranks: int) -> Cluster | None:
    """This machine's devices as one island of so many; None where it has not one for each."""
    machine, _ = this_machine([ranks])
    on_host = machine.native == native_of(device_type=HOST).library
    if machine.gpus is not None or on_host != (row.vendor == HOST):
        return None
    return label_machine([SpecIsland(row.vendor, (SpecPart(row.name, ranks),))], machine)


def _of_group(cluster: Cluster, asked: ClassToMeasure, sink: Sink) -> ClassProfile:
    """What a tensor group of all the cluster's ranks takes, the first one telling. Raises WorkFailed."""
    found: list[ClassProfile] = []

    def on_figures(event: str, values: dict[str, Any]) -> None:
        if event == "shape" and values["entry"] is not None:
            found.append(decode(ClassProfile, values["entry"], where=asked.device_class))
        elif values.get("problem"):
            sink.warn(f"{asked.device_class}: {values['problem']}")

    files = {variables.BENCH_CLASSES: json.dumps([encode(asked)] * asked.tensor)}
    run_ranks("hetctl.trainer.bench.classes", Launch.of(cluster), on_figures, files=lambda _: files, sink=sink)
    if not found:
        raise WorkFailed("the tensor group measured nothing: not even the first number of samples fits")
    return found[0]


def asked_shape(model: str, seq_len: int | None, samples: str) -> ShapeToMeasure:
    """A model's shape at a length, or its usual one. Raises ConfigError."""
    shape = find_shape(model)
    length = usual_length(shape) if seq_len is None else seq_len
    if length > shape.max_seq_len or length < 1:
        raise ConfigError(f"--seq-len {length} is not within the {shape.max_seq_len} positions of '{shape.name}'")
    return ShapeToMeasure(shape, length, _samples(samples))


def add_to_profile(path: Path, *entries: ClassProfile | BridgeProfile, native_sums: tuple[SumPoint, ...] = ()) -> None:
    """Write a profile with these entries, beside those it already had. Raises ConfigError, OSError."""
    with alone_in(path.parent):  # measurements of several machines may end at once
        profile = _there(path)
        for entry in entries:
            profile = profile.with_class(entry) if isinstance(entry, ClassProfile) else profile.with_bridge(entry)
        save_profile(path, replace(profile, native_sums=native_sums or profile.native_sums))


def refuse_profile(path: Path) -> None:
    """Raise ConfigError or OSError where nothing can be added to a profile: before anything is measured."""
    refuse_unwritable(path)
    _there(path)


def _there(path: Path) -> Profile:
    return load_profile(path) if path.exists() else Profile(())


def table(entry: ClassProfile) -> Table:
    """Seconds by layer kind and samples, for people."""
    shown = Table("layer", "samples", "forward", "backward")
    for kind in ("embedding", "block", "head"):
        for point in getattr(entry, kind):
            shown.add_row(kind, str(point.samples), show_seconds(point.forward_s), show_seconds(point.backward_s))
    if host := entry.launches:
        for mode, least in (("selective", host.selective), ("full", host.full)):
            both = show_seconds(least.forward_s), show_seconds(least.backward_s)
            shown.add_row(f"block, recompute={mode}, at least", "", *both)
    if entry.update_s is not None:
        shown.add_row("update, 10^9 parameters", "", show_seconds(entry.update_s * 1e9), "")
    if away := entry.offloaded:
        whole = show_seconds((away.copies_s + away.alone_s) * 1e9)
        shown.add_row("the same, offloaded, alone on its host", "", whole, "")
    return shown


def document(entry: ClassProfile) -> dict[str, Any]:
    """The entry as plain data."""
    plain: dict[str, Any] = encode(entry)
    return plain


def _samples(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if counts[0] < 1:
        raise ConfigError(f"--samples '{text}' is not a list of whole numbers", hint="for example --samples 1,2,4")
    return counts
