"""What plans assume of one kind of accelerator: a row of the hardware table, or what a person says of it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Literal

from hetctl.comm.contract.units import GiB

Precision = Literal["bf16", "fp16", "tf32", "fp32", "fp64"]
DEFAULT_MFU = 0.45
_GUESSED = {"tf32": 2.0, "fp32": 16.0, "fp64": 64.0}  # times slower than bf16, where no figure is known
_CHIPLET_MODES = {"spx": 1, "dpx": 2, "tpx": 3, "qpx": 4}  # into how many equal parts; cpx: one a chiplet
# of MIG: compute slices and gigabytes; before them how many of those slices a compute instance has of its own
_SLICES = re.compile(r"(?:(?P<own>\d+)c\.)?(?P<slices>\d+)g\.(?P<memory>\d+)gb.*")


def own_share(profile: str) -> float:
    """What a compute instance may take of its MIG instance's memory, which the others of it see as theirs too."""
    found = _SLICES.fullmatch(profile)
    return min(1.0, int(found["own"]) / int(found["slices"])) if found and found["own"] else 1.0


@dataclass(frozen=True)
class DeviceClass:
    """One kind of accelerator: GPUs that compute alike."""

    name: str  # as `--emulate` and plans call it
    vendor: str  # nvidia, amd, ...
    memory_bytes: int  # of one device
    memory_bytes_per_s: float  # of its memory, the vendor's figure
    peak_tflops: float  # dense bf16 (fp16 where the class has no bf16); 0: unknown
    published_tflops: float | None = None  # sustained in training, from a publication
    nic_bytes_per_s: float = 25e9  # the usual NIC beside one such GPU
    native_bytes_per_s: float = 300e9  # to a neighbour in the same host, one way, as collectives reach it
    host_bytes_per_s: float = 25e9  # pinned copies to and from the host, one way
    launch_s: float = 20e-6  # what starting one layer's forward costs, whatever its size
    runtime_bytes: int = 2 * GiB  # context, communicators, workspaces
    product_names: tuple[str, ...] = ()  # substrings of what drivers report, most specific first
    price_per_hour: float | None = None  # in whatever currency all prices are
    bf16: bool = True  # whether it multiplies bf16 in hardware
    tf32: bool = False  # whether torch can have it multiply fp32 values as TF32
    fp32_tflops: float | None = None  # the vendor's dense peak, without TF32
    fp64_tflops: float | None = None  # the vendor's dense peak
    fp16_tflops: float | None = None  # where it is not bf16's
    fp8_tflops: float | None = None  # recorded, not yet computed in
    slices: int = 0  # of compute, that MIG shares out; 0: it cannot be partitioned so
    chiplets: int = 0  # that partition modes share out; 0: it cannot be partitioned so
    ids: tuple[str, ...] = ()  # PCI vendor:device, or vendor:device/vendor:device with the subsystem's
    architecture: str = ""  # sm_90, gfx942; '' where the driver tells none
    source: str = ""  # the document that its figures are of
    estimate: str = ""  # how its figures were guessed, '' where they are known
    mfu: float = DEFAULT_MFU  # of the peak, where nothing is published: what a like class sustains

    @property
    def sustained_tflops(self) -> float:
        return self.published_tflops or self.peak_tflops * self.mfu

    def computes(self, precision: Precision) -> bool:
        """Whether it has that precision; fp16, fp32 and fp64 everything has."""
        return {"bf16": self.bf16, "tf32": self.tf32}.get(precision, True)

    def peak_in(self, precision: Precision) -> float:
        """The dense peak in TFLOPS; 0 where the vendor's is unknown.

        fp16 is as fast as bf16 unless the class says otherwise, TF32 half as fast (NVIDIA's data sheets from the A100
        on); fp32 is never TF32 unasked.
        """
        own = {"fp16": self.fp16_tflops or self.peak_tflops, "fp32": self.fp32_tflops, "fp64": self.fp64_tflops}
        halves = self.peak_tflops / (2 if precision == "tf32" else 1)
        return own.get(precision, halves) or 0.0

    def sustained_in(self, precision: Precision) -> float:
        """TFLOPS in training: of every precision's peak the same share; where a peak is unknown, a cautious guess."""
        if self.vendor == "cpu":  # a CPU's figure is of fp32
            return self.sustained_tflops / (2 if precision == "fp64" else 1)
        if self.peak_tflops and (peak := self.peak_in(precision)):
            return self.sustained_tflops * (peak / self.peak_tflops)
        return self.sustained_tflops / _GUESSED.get(precision, 1.0)

    def scaled(self, compute: float, rates: float) -> DeviceClass:
        """The same with a share of its compute, and of what its memory and its links move per second."""
        shares = {f.name: compute if f.name.endswith("_tflops") else rates for f in fields(self)}
        known = {name: getattr(self, name) for name in shares if name.endswith(("_tflops", "_bytes_per_s"))}
        return replace(self, **{name: value and value * shares[name] for name, value in known.items()})

    def part(self, mode: str) -> DeviceClass | None:
        """A partition (`3g.40gb` of MIG, `cpx`, `dpx`) as its share of the whole; None where it is not known."""
        count = self.chiplets if mode == "cpx" else _CHIPLET_MODES.get(mode, 0)
        if count and self.chiplets and self.chiplets % count == 0:
            return self._share(mode, 1 / count, self.memory_bytes // count)
        found = _SLICES.fullmatch(mode)
        if found is None or int(found["slices"]) > self.slices:
            return None
        compute, memory = int(found["own"] or found["slices"]), min(int(found["memory"]) * GiB, self.memory_bytes)
        return self._share(mode, compute / self.slices, int(memory * own_share(mode)))

    def _share(self, mode: str, compute: float, memory: int) -> DeviceClass:
        part = memory / self.memory_bytes
        return replace(
            self.scaled(compute, part),
            name=f"{self.name}/{mode}",
            memory_bytes=memory,
            product_names=(),
            ids=(),
            price_per_hour=self.price_per_hour and self.price_per_hour * part,
        )
