"""Publications: what others measured of their layouts, re-typed as YAML, and what that asks of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Literal

from hetctl.comm.contract.cluster import SCHEMA_VERSION, Cluster, read_versioned
from hetctl.comm.contract.device_class import DeviceClass, Precision
from hetctl.comm.contract.emulate import describe_cluster, parse_spec
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.model.tensor_cuts import cannot_cut
from hetctl.trainer.planning.costs import MODES, OVERLAP_COST, LayerCosts, ValueBytes
from hetctl.trainer.planning.hardware import CLASSES, OwnDevice
from hetctl.trainer.planning.layout import Engine, Layout
from hetctl.trainer.planning.link_rates import read_link_rates
from hetctl.trainer.planning.own_hardware import with_own
from hetctl.trainer.planning.pools import read_pools
from hetctl.trainer.planning.problem import Problem, tolerance_of
from hetctl.trainer.planning.profile import BridgeProfile, ClassProfile, Profile
from hetctl.trainer.planning.space import TENSOR_DEGREES, Pins

Counted = Literal["causal", "full", "recomputed"]


@dataclass(frozen=True)
class Source:
    """Where the figures were read. Facts and figures are re-typed, nothing else is taken."""

    title: str
    where: str  # address, table or file
    licence: str
    read: Literal["R", "R2", "D", "M"]  # in the source, second-hand, derived from such, from memory
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """What was measured, in the publication's own unit: exactly one."""

    seconds: float | None = None  # of a step
    tflops_per_gpu: float | None = None
    tokens_per_s: float | None = None  # of all devices
    tokens_per_s_per_gpu: float | None = None
    samples_per_s: float | None = None


@dataclass(frozen=True)
class Case:
    """One layout on one cluster (a SPEC), and its measured figure."""

    name: str
    cluster: str
    layout: Layout
    measured: Figure
    model: str | None = None  # otherwise the publication's
    seq_len: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Publication:
    """One YAML file. `devices` are as in hardware.yaml, `profiles` and `bridges` as in profile.yaml."""

    name: str
    source: Source
    cases: tuple[Case, ...]
    model: str | None = None
    seq_len: int | None = None
    precision: Precision = "bf16"
    gradient_bytes: int | None = None  # of one value, between replicas; None: as hetctl keeps them
    shared_update: bool = False  # replicas share out optimiser state: weights come back in the computing precision
    counted: Counted = "causal"  # which FLOPs its TFLOPS are of
    engine: Engine = field(default_factory=Engine)
    bridge: str = "auto"
    shapes: tuple[ModelShape, ...] = ()  # models that hetctl does not know by name
    devices: Mapping[str, OwnDevice] = field(default_factory=dict)
    profiles: tuple[ClassProfile, ...] = ()
    bridges: tuple[BridgeProfile, ...] = ()
    left_out: tuple[str, ...] = ()  # figures of the source that are not here, each with the reason
    schema_version: int = SCHEMA_VERSION

    def key(self, case: Case) -> str:
        """A name of the case that no other publication has."""
        return f"{self.name}: {case.name}"

    def held_out(self, case: Case) -> bool:
        """Whether the case is kept out of all fitting: half of them are, by a hash of their names."""
        return sha256(self.key(case).encode()).digest()[-1] % 2 == 1

    def shape(self, case: Case) -> ModelShape:
        """The model of a case. Raises ConfigError."""
        name = case.model or self.model or ""
        known = SHAPES | {s.name: s for s in self.shapes}
        if name not in known:
            raise ConfigError(f"{self.name}, {case.name}: '{name}' is no model", hint=nearest(name, known))
        return known[name]

    def length(self, case: Case) -> int:
        """Tokens of a sample. Raises ConfigError."""
        if not (found := case.seq_len or self.seq_len):
            raise ConfigError(f"{self.name}, {case.name}: how many tokens a sample has is not said (seq_len)")
        return found

    def cluster(self, case: Case) -> Cluster:
        """The cluster of a case, with the classes that the publication adds or corrects. Raises ConfigError."""
        return with_own(describe_cluster(parse_spec(case.cluster, self._classes), self._classes), self._rows)

    def problem(self, case: Case) -> Problem:
        """What the planner would have been asked. Raises ConfigError."""
        cluster, shape = self.cluster(case), self.shape(case)
        pools = read_pools(cluster, precision=self.precision)
        profile = Profile(self.profiles, self.bridges)
        measured = profile.matching(shape, self.length(case))
        costs = LayerCosts(shape, self.length(case), self._values, measured, overlap_cost=OVERLAP_COST)
        return Problem(
            costs=costs,
            pools=pools,
            links=read_link_rates(cluster, pools, forced=self.bridge, measured=self.bridges),
            modes=MODES,
            tensors=tuple(t for t in TENSOR_DEGREES if not cannot_cut(shape, t)),
            pins=Pins(),
            samples=case.layout.samples,
            tolerance=tolerance_of(pools),
        )

    def seconds(self, case: Case) -> float:
        """The measured figure as seconds of a step: the one place where units are converted. Raises ConfigError."""
        said = {f.name: getattr(case.measured, f.name) for f in fields(Figure)}
        found: dict[str, float] = {name: value for name, value in said.items() if value is not None}
        if len(found) != 1:
            raise ConfigError(f"{self.name}, {case.name}: one measured figure is needed, found {len(found)}")
        [(unit, value)] = found.items()
        samples, tokens = case.layout.samples, case.layout.samples * self.length(case)
        gpus = case.layout.devices
        flops = tokens * step_flops_per_token(self.shape(case), self.length(case), self.counted)
        work = {
            "seconds": value * value,
            "tflops_per_gpu": flops / gpus / 1e12,
            "tokens_per_s": float(tokens),
            "tokens_per_s_per_gpu": tokens / gpus,
            "samples_per_s": float(samples),
        }
        return work[unit] / value

    @cached_property
    def _rows(self) -> tuple[DeviceClass, ...]:
        table, found = CLASSES, []
        for name, one in self.devices.items():
            found.append(one.row(name, table, f"{self.name}, {name}"))
            table = table.with_own([found[-1]])
        return tuple(found)

    @cached_property
    def _classes(self) -> Mapping[str, DeviceClass]:
        return CLASSES.with_own(self._rows)

    @property
    def _values(self) -> ValueBytes:
        values = ValueBytes.of(self.precision, over_replicas=self.shared_update)
        return replace(values, gradients=self.gradient_bytes or values.gradients)


def step_flops_per_token(shape: ModelShape, seq_len: int, counted: Counted) -> float:
    """Forward and backward FLOPs of a token as publications count them.

    `causal`: half of attention's square, as hetctl does. `full`: all of it (PaLM, appendix B: 6N + 12 L h s).
    `recomputed`: all of it, and every block's forward once more (Megatron-LM, arXiv 2104.04473, section 5.1).
    """
    if counted == "causal":
        return shape.token_flops(seq_len)
    block = shape.block_flops(seq_len) + 2.0 * shape.heads * shape.head_dim * seq_len
    return (4 if counted == "recomputed" else 3) * shape.layers * block + 3 * shape.head_flops()


def read_publications(folder: Path, *, only: str | None = None) -> tuple[Publication, ...]:
    """Every publication of a folder, in order of file names. Raises ConfigError."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(f"no publication (*.yaml) is in {folder}")
    found = [read_versioned(file, Publication, what="publication") for file in files]
    known = {file.stem: one for file, one in zip(files, found, strict=True)}
    if only is not None and only not in known:
        raise ConfigError(f"'{only}' is no publication in {folder}", hint=nearest(only, known))
    kept = found if only is None else [known[only]]
    for one in kept:
        _check(one)
    return tuple(kept)


def _check(publication: Publication) -> None:
    Profile(publication.profiles, publication.bridges).validate(where=publication.name)
    names = [case.name for case in publication.cases]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{publication.name} has two cases called {' and '.join(sorted(twice))}")
    for case in publication.cases:
        publication.seconds(case)
