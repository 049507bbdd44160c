"""In which precision a job computes: one for all its ranks, and never one that a device lacks."""

from __future__ import annotations

from dataclasses import replace

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.planning.pools import base_class
from hetctl.trainer.recipe import Auto, Recipe

_HINTS = {
    "bf16": "train.precision=fp16 or fp32, or leave it out",
    "tf32": "train.precision=fp32: TF32 is NVIDIA's, from Ampere on; torch does not take AMD's XF32",
}


def precision_of(cluster: Cluster, recipe: Recipe) -> Precision:
    """What the recipe asks for; left to us bf16, fp16 where a device has no bf16, fp32 on CPUs. Raises ConfigError."""
    found = _possible(cluster, recipe.train.precision)
    if found != "fp16" and recipe.train.loss_scale != "auto":
        raise ConfigError(f"train.loss_scale is fp16's, and this would compute in {found}", hint="train.precision=fp16")
    return found


def _possible(cluster: Cluster, asked: Precision | Auto) -> Precision:
    if asked == "auto":
        return "fp32" if on_cpus(cluster) else "fp16" if lacking(cluster, "bf16") else "bf16"
    if names := lacking(cluster, asked):
        raise ConfigError(
            f"train.precision={asked} is not possible: {' and '.join(names)} cannot multiply {asked}",
            hint=_HINTS[asked],
        )
    return asked


def measured_in(cluster: Cluster, asked: Precision | Auto) -> Precision | None:
    """In what its devices are to be measured; None: as they are unasked. Raises ConfigError."""
    found = _possible(cluster, asked)
    return None if found == ("fp32" if on_cpus(cluster) else "bf16") else found


def settled(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe with its precision decided where ranks left alone would choose unlike ones. Raises ConfigError."""
    precision = precision_of(cluster, recipe)
    if not why_not_bf16(cluster, recipe):
        return recipe
    return replace(recipe, train=replace(recipe.train, precision=precision))


def why_not_bf16(cluster: Cluster, recipe: Recipe) -> tuple[str, ...]:
    """What a person should know where bf16 was not taken."""
    names = lacking(cluster, "bf16")
    if recipe.train.precision != "auto" or not names or on_cpus(cluster):
        return ()
    return (f"All compute in fp16, since {' and '.join(names)} cannot multiply bf16 (train.precision).",)


def lacking(cluster: Cluster, precision: Precision) -> list[str]:
    """The device classes of a cluster that cannot compute so, as they really are whatever they are called."""
    labels = dict.fromkeys(d.device_class for h in cluster.hosts for d in h.devices)
    rows = dict.fromkeys(base_class(cluster, label) for label in labels)
    return [row.name for row in rows if not row.computes(precision)]


def on_cpus(cluster: Cluster) -> bool:
    """Whether CPU processes compute."""
    return cluster.runs == "gloo" or {i.vendor for i in cluster.islands} == {"cpu"}
