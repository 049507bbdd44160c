"""What `plan` and `train` share: from planning options to a recipe and a cluster."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetctl.comm.contract.cluster import Cluster
    from hetctl.console import Sink
    from hetctl.trainer.planning.profile import Profile
    from hetctl.trainer.recipe import Recipe

DEFAULT_TOKENS = 4096  # per sample of a described model, where its positions allow
SAMPLES_PER_DEVICE = 24  # divides by many numbers of devices and micro-batches
MAX_SAMPLES = 4096
DEFAULT_SPEC = "h200:2,mi325x:2"


def read_recipe(
    path: Path | None,
    *,
    settings: Sequence[str] | None = None,
    model: str | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    split: str | None = None,
    alpha: float | None = None,
    bridge: str | None = None,
) -> Recipe:
    """The recipe of a command line: the file, then `--set`, then the options. Raises ConfigError."""
    from hetctl.trainer.recipe import load_recipe, parse_override

    overrides: list[tuple[str, Any]] = [parse_override(text) for text in settings or ()]
    for key, value in (
        ("model.name", model),
        ("model.seq_len", seq_len),
        ("batch.global_batch", global_batch),
        ("parallelism.split", split),
        ("parallelism.alpha", alpha),
        ("bridge.transport", bridge),
    ):
        if value is not None:
            overrides.append((key, value))
    return load_recipe(path, overrides)


def with_sizes(recipe: Recipe, cluster: Cluster, *, given: Collection[str]) -> tuple[Recipe, list[str]]:
    """The recipe with sizes fit for a real model where nobody gave any, and sentences that say so.

    The recipe's own defaults are the demo's: right for a model of a million parameters only. `given` are the
    recipe keys that a person set.
    """
    notes: list[str] = []
    model, batch = recipe.model, recipe.batch
    if model.name == "demo":
        return recipe, notes
    if "model.seq_len" not in given:
        model = replace(model, seq_len=min(DEFAULT_TOKENS, recipe.shape().max_seq_len))
        notes.append(f"no --seq-len given: {model.seq_len} tokens per sample")
    if "batch.global_batch" not in given:
        devices = sum(len(i.members) for i in cluster.islands)
        batch = replace(batch, global_batch=min(SAMPLES_PER_DEVICE * devices, MAX_SAMPLES))
        notes.append(f"no --global-batch given: {batch.global_batch} samples per step")
    return replace(recipe, model=model, batch=batch), notes


def find_cluster(cluster: Path | None, emulate: str | None, *, sink: Sink) -> Cluster:
    """The cluster to plan for: `--cluster`, `--emulate` (described, not owned), or ./cluster.yaml, said aloud."""
    from hetctl.comm.contract.cluster import load_cluster
    from hetctl.comm.contract.emulate import describe_cluster, parse_spec
    from hetctl.comm.contract.errors import ConfigError
    from hetctl.trainer.planning.hardware import CLASSES

    if cluster and emulate:
        raise ConfigError("--cluster and --emulate exclude each other", hint="give one of them")
    if cluster:
        return load_cluster(cluster)
    if emulate and emulate.endswith((".yaml", ".yml")):
        return load_cluster(Path(emulate))
    if emulate:
        return describe_cluster(parse_spec(emulate, CLASSES), CLASSES)
    here = Path("cluster.yaml")
    if here.is_file():
        sink.warn("planning for ./cluster.yaml")
        return load_cluster(here)
    sink.warn(f"no --cluster, no --emulate and no ./cluster.yaml: planning for {DEFAULT_SPEC}, which you need not own")
    return describe_cluster(parse_spec(DEFAULT_SPEC, CLASSES), CLASSES)


def read_profile(path: Path | None) -> Profile | None:
    """The profile of `--profile`, if any. Raises ConfigError."""
    from hetctl.trainer.planning.profile import load_profile

    return load_profile(path) if path else None


def read_speeds(text: str | None) -> dict[str, float]:
    """Class -> sustained TFLOPS per GPU, from `--speed`. Raises ConfigError."""
    from hetctl.comm.contract.errors import ConfigError

    speeds: dict[str, float] = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, value = part.partition("=")
        try:
            speeds[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals or not 0 < speeds[name.strip()] < 1e6:
            raise ConfigError(f"'{part}' is not CLASS=TFLOPS", hint="for example --speed h200=549.7,mi325x=534.9")
    return speeds


def given_keys(settings: Sequence[str] | None, *, seq_len: int | None, global_batch: int | None) -> set[str]:
    """The recipe keys that a command line set, of those that have sensible defaults only for the demo."""
    given = {text.partition("=")[0] for text in settings or ()}
    given |= {"model.seq_len"} if seq_len is not None else set()
    return given | ({"batch.global_batch"} if global_batch is not None else set())
