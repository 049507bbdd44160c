"""From options to what they mean, once for every command: the recipe, the cluster, a person's plan, measured costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hetctl.comm.contract.errors import ConfigError
from hetctl.commands.options import RunOptions
from hetctl.console import Sink

if TYPE_CHECKING:
    from hetctl.comm.contract.cluster import Cluster
    from hetctl.comm.contract.plan import Plan
    from hetctl.trainer.planning.profile import Profile
    from hetctl.trainer.recipe import Recipe

NAME_ONE = "--model llama-8b (`hetctl models` lists them; --model demo is what `hetctl train` takes), or a recipe"
_PLANNED = ("parallelism.split", "parallelism.alpha", "parallelism.order")  # nothing in a plan file tells of these


@dataclass(frozen=True)
class Resolved:
    """What the options mean."""

    recipe: Recipe
    cluster: Cluster
    plan: Plan | None = None  # a person's, to be run as it is
    speeds: Mapping[str, float] = field(default_factory=dict)  # class -> sustained TFLOPS per GPU
    profile: Profile | None = None


def with_model(options: RunOptions, sink: Sink) -> RunOptions:
    """The options with a model: a person who named none is asked, where somebody can be."""
    if _names_model(options):
        return options
    return replace(options, model=sink.ask("which model? a name (`hetctl models` lists them) or a Hugging Face folder"))


def require_model(options: RunOptions) -> None:
    """Raise ConfigError where neither a recipe nor an option names a model."""
    if not _names_model(options):
        raise ConfigError("a plan is of a model, and none was named", hint=NAME_ONE)


def _names_model(options: RunOptions) -> bool:
    return options.recipe is not None or any(key == "model.name" for key, _ in options.overrides)


def lead(options: RunOptions, sink: Sink) -> RunOptions:
    """`--launcher none`: meet the job's other processes, of which those that do not lead stay until the run is over,
    and exit. Where the options name no cluster, it is what the hosts say of themselves. Raises ConfigError."""
    from hetctl.discovery.started import found_cluster
    from hetctl.launcher.engines.started import take_part

    take_part()
    return (
        options if options.cluster or options.plan or options.emulate else replace(options, cluster=found_cluster(sink))
    )


def resolve(options: RunOptions, sink: Sink, *, runs: bool, trains: bool = False) -> Resolved:
    """Where it `runs`, an emulation labels this machine's devices; otherwise it describes some that need not exist.

    Raises ConfigError. What nobody gave is assumed, and said; what a real model is trained on (it `trains`) is not.
    """
    from hetctl.trainer.planning.profile import load_profile
    from hetctl.trainer.recipe import given_keys, load_recipe

    recipe = load_recipe(options.recipe, options.overrides)
    given = given_keys(options.recipe, options.overrides)
    if trains:
        _refuse_no_data(recipe, given)
    cluster, plan = resolve_where(options, sink, runs=runs, layers=recipe.shape().layers)
    recipe = _with_sizes(recipe, cluster, plan, sink, given=given)
    recipe = _with_rate(recipe, given, say=sink.warn if trains else lambda sentence: None)
    profile = load_profile(options.profile) if options.profile else None
    return Resolved(recipe, cluster, plan, read_speeds(options.speed), profile)


def resolve_where(
    options: RunOptions, sink: Sink, *, runs: bool = True, layers: int | None = None
) -> tuple[Cluster, Plan | None]:
    """The cluster that the options mean, and a person's plan, of a model with so many layers. Raises ConfigError."""
    from hetctl.comm.contract.plan import load_plan
    from hetctl.discovery.which_cluster import Where, described_cluster, running_cluster
    from hetctl.trainer.planning.own_hardware import own_classes, with_own

    if options.plan is not None and options.emulate is not None:
        raise ConfigError("--plan already says where: leave out --emulate")
    given = [key for key, _ in options.overrides if key in _PLANNED] if options.plan else []
    given += [f"--{name}" for name in ("profile", "speed") if options.plan and getattr(options, name) is not None]
    if given:
        raise ConfigError(
            f"--plan is decided already: {' and '.join(given)} would change nothing",
            hint="leave it out, or make the plan anew with it: `hetctl plan ... -o plan.yaml`",
        )
    said = partial(own_classes, options.hardware, options.device or ())
    where = Where(options.cluster, options.emulate, links=tuple(options.link or ()))
    if options.emulate is not None and where.emulated_file is None:
        where = replace(where, classes=said())  # of which a SPEC may speak
    plan = load_plan(options.plan, layers=layers) if options.plan else None
    cluster = running_cluster(where, sink, plan=plan) if runs else described_cluster(where, sink)
    return with_own(cluster, said(known=cluster.classes)), plan


def _refuse_no_data(recipe: Recipe, given: set[str]) -> None:
    """The demo's text is no text for a real model, and its loss on it no result. Raises ConfigError."""
    from hetctl.trainer.recipe import STDLIB

    if recipe.model.name != "demo" and not {"data.source", "data.sources"} & given:
        raise ConfigError(
            f"nothing says what to train {recipe.model.name} on",
            hint="--data PATH names a text, a .jsonl, a .parquet or a folder of such (in a recipe: `data: "
            f"{{source: PATH}}`); --data {STDLIB} takes Python's own sources, to try it",
        )


def _with_sizes(recipe: Recipe, cluster: Cluster, plan: Plan | None, sink: Sink, *, given: set[str]) -> Recipe:
    """The recipe with the sizes of a plan, or fit for a real model, where nobody gave any.

    The recipe's own defaults are the demo's: right for a model of a million parameters only.
    """
    from hetctl.trainer.recipe import usual_samples

    if plan is None and recipe.model.name == "demo":
        return recipe
    recipe = with_length(recipe, plan, sink, given=given)
    batch, source = recipe.batch, " (the plan's)" if plan else ""
    if "batch.global_batch" not in given:
        usual = plan.global_batch if plan else usual_samples(sum(len(i.members) for i in cluster.islands))
        batch = replace(batch, global_batch=usual)
        sink.warn(f"no --global-batch given: {batch.global_batch} samples per step{source}")
    return replace(recipe, batch=batch)


def with_length(recipe: Recipe, plan: Plan | None, sink: Sink, *, given: set[str]) -> Recipe:
    """The recipe with a plan's tokens per sample, or a real model's usual ones, where nobody gave any."""
    from hetctl.trainer.recipe import usual_length

    if "model.seq_len" in given or (plan is None and recipe.model.name == "demo"):
        return recipe
    length, source = (plan.seq_len, " (the plan's)") if plan else (usual_length(recipe.shape()), "")
    sink.warn(f"no --seq-len given: {length} tokens per sample{source}")
    return replace(recipe, model=replace(recipe.model, seq_len=length))


def _with_rate(recipe: Recipe, given: set[str], *, say: Callable[[str], None]) -> Recipe:
    """The recipe with a learning rate that fits the model, where nobody gave one: the demo's would ruin weights."""
    from hetctl.trainer.model.config import find_weights
    from hetctl.trainer.recipe import usual_rate

    if recipe.model.name == "demo" or "optimizer.lr" in given:
        return recipe
    tunes = find_weights(recipe.model.name) is not None
    rate = usual_rate(recipe.shape(), tunes=tunes)
    usual = "for adapters" if recipe.lora.rank else "to fine-tune weights" if tunes else "for a model of this size"
    say(f"no optimizer.lr given: {rate:g}, usual {usual}")
    return replace(recipe, optimizer=replace(recipe.optimizer, lr=rate))


def read_speeds(text: str | None) -> dict[str, float]:
    """Class -> sustained TFLOPS per GPU, from `--speed`. Raises ConfigError."""
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
