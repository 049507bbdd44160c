"""In which precision a job computes: one for all its ranks, and never one that a device lacks."""

from __future__ import annotations

from dataclasses import replace

from hetctl.comm.contract.cluster import Cluster
from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.errors import ConfigError
from hetctl.trainer.planning.pools import base_class
from hetctl.trainer.recipe import Recipe


def precision_of(cluster: Cluster, recipe: Recipe) -> Precision:
    """What the recipe asks for; left to us bf16 where every device has it, otherwise fp32. Raises ConfigError."""
    asked, lacking = recipe.train.precision, without_bf16(cluster)
    if asked == "bf16" and lacking:
        raise ConfigError(
            f"train.precision=bf16 is not possible: {' and '.join(lacking)} cannot multiply bf16",
            hint="train.precision=fp32, or leave it out",
        )
    if asked != "auto":
        return asked
    return "fp32" if lacking or on_cpus(cluster) else "bf16"


def settled(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe with its precision decided where ranks left alone would choose unlike ones. Raises ConfigError."""
    precision = precision_of(cluster, recipe)
    if recipe.train.precision != "auto" or not without_bf16(cluster):
        return recipe
    return replace(recipe, train=replace(recipe.train, precision=precision))


def why_not_bf16(cluster: Cluster, recipe: Recipe) -> tuple[str, ...]:
    """What a person should know where bf16 was not taken."""
    lacking = without_bf16(cluster)
    if recipe.train.precision != "auto" or not lacking:
        return ()
    return (f"All compute in fp32, since {' and '.join(lacking)} cannot multiply bf16 (train.precision).",)


def without_bf16(cluster: Cluster) -> list[str]:
    """The device classes of a cluster that have no bf16, as they really are; none where CPUs compute."""
    labels = dict.fromkeys(d.device_class for h in cluster.hosts for d in h.devices)
    rows = dict.fromkeys(base_class(cluster, label) for label in labels)
    return [row.name for row in rows if not row.bf16]


def on_cpus(cluster: Cluster) -> bool:
    """Whether CPU processes compute."""
    return cluster.runs == "gloo" or {i.vendor for i in cluster.islands} == {"cpu"}
