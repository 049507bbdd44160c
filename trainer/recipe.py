"""The recipe: what a person asks for (model, data, optimiser, batch, parallelism), as frozen values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import frexp, inf, log
from pathlib import Path
from typing import Any, Literal

from hetctl.comm.contract.cluster import TransportKind
from hetctl.comm.contract.errors import ConfigError, nearest
from hetctl.comm.contract.files import read_yaml
from hetctl.comm.contract.values import decode, encode, show
from hetctl.trainer.model.adapters import Adapters
from hetctl.trainer.model.config import find_shape, model_folder
from hetctl.trainer.model.shapes import SHAPES, ModelShape
from hetctl.trainer.schedule import SCHEDULES

Auto = Literal["auto"]
TOKENIZER = "tokenizer.json"
STDLIB, CHATML = "python-stdlib", "chatml"
PAIRS = "chosen/rejected"
NO_PATHS = (STDLIB, "bytes", "auto", CHATML)  # words of the data section that name no file
SEEDS = (-(2**63), 2**64 - 1)  # what torch.manual_seed takes
Rule = Literal["adamw", "adamw_8bit", "sgd"]  # of an update
MAX_LR = 1e30  # fp32 ends at 3e38, and AdamW divides by as little as 1 - beta1
MAX_LOSS_SCALE = 2.0**64  # squares of scaled gradients have to fit fp32
MAX_SAMPLES = 100_000_000  # of a step: planning looks at each of its divisors
USUAL_TOKENS = 4096  # per sample
USUAL_SAMPLES = 24  # of a step, per device: it divides by many numbers of devices and micro-batches
MOST_USUAL_SAMPLES = 4096  # of a step
FINE_TUNING_RATE = 2e-5  # of all weights: small steps, away from what they know
ADAPTER_RATE = 2e-4  # Dettmers et al., "QLoRA" (arXiv 2305.14314), table 9: 7B and 13B
# From random weights, by parameters: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1
USUAL_RATES = (
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1e-4),
    (175e9, 0.6e-4),
)
MAX_TIMEOUT_S = 1e7  # four months; timers overflow where it is far longer


@dataclass(frozen=True)
class ModelSection:
    """Which model: a known name, or the path of a Hugging Face config.json or its folder."""

    name: str = "demo"  # `hetctl models` lists the known ones
    seq_len: int = 128  # tokens per sample


@dataclass(frozen=True)
class SourceSection:
    """One of several sources, mixed sample by sample."""

    source: str  # as data.source
    weight: float = 1.0  # its share of the samples, among the weights of all


@dataclass(frozen=True)
class DataSection:
    """Where the text comes from. `python-stdlib` is the source of the running Python's standard library.

    Rows with `messages`, `conversations`, or `prompt` and `completion` (and without `field`) are conversations: each is
    a sample, rendered by the model's chat template, and its loss is that of what the assistant says. Rows with `chosen`
    and `rejected` are preference pairs, which `dpo` trains on.
    """

    source: str = STDLIB  # or a text, .jsonl, .parquet or .arrow file, a folder of such, or Megatron's .bin/.idx
    tokenizer: str = "bytes"  # or a Hugging Face tokenizer.json (or its folder); unnamed: the model folder's, if any
    # send source and tokenizer from here to hosts that do not have the same; tokens are kept under the other keys
    ship: bool = field(default=False, repr=False)
    # several sources instead of one: `[{source: a.jsonl, weight: 2}, {source: b.jsonl}]`
    sources: tuple[SourceSection, ...] = field(default=(), repr=False)
    # a chat template (a Jinja file), or `chatml`; auto: the one beside the tokenizer
    template: str = field(default="auto", repr=False)
    # conversations of more than model.seq_len tokens: their beginning is kept, none of them, or nothing is trained
    long: Literal["cut", "drop", "error"] = field(default="cut", repr=False)
    # several conversations in a sample, none of which sees another
    packing: bool = field(default=False, repr=False)
    field: str = "text"  # the key of the text in rows
    validation_share: float = 0.05  # of the files (or documents), held out
    seed: int = 0  # of their order, and of what is held out

    @property
    def each(self) -> tuple[DataSection, ...]:
        """The same of each of its sources."""
        return tuple(replace(self, source=s.source, sources=()) for s in self.sources) or (self,)

    @property
    def paths(self) -> tuple[str, ...]:
        """All that it names of files and folders."""
        named = (*(one.source for one in self.each), self.tokenizer, self.template)
        return tuple(path for path in named if path not in NO_PATHS)

    def at(self, place: Callable[[str], str]) -> DataSection:
        """The same with `place` of each of these paths."""
        moved = {path: place(path) for path in self.paths}
        source, tokenizer, template = (moved.get(p, p) for p in (self.source, self.tokenizer, self.template))
        sources = tuple(replace(s, source=moved.get(s.source, s.source)) for s in self.sources)
        return replace(self, source=source, sources=sources, tokenizer=tokenizer, template=template)


@dataclass(frozen=True)
class BatchSection:
    """Samples per step over all replicas; the planner shares them out."""

    global_batch: int = 16  # samples in a step
    micro_batch_size: int | Auto = "auto"  # samples in a micro-batch, over the width of a stage


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW (in 8 bits, if asked) or SGD, with linear warm-up, then cosine decay to `min_lr_share` of the peak."""

    name: Rule = "adamw"  # the rule of the update; adamw_8bit keeps its two moments in 8 bits
    lr: float = 2e-3  # the peak learning rate
    weight_decay: float = 0.1  # of matrices; norms and biases have none
    beta1: float = 0.9  # of AdamW: decay of the mean of gradients
    beta2: float = 0.95  # of AdamW: decay of the mean of their squares
    eps: float = 1e-8  # of AdamW: added to the root of that
    warmup_steps: int = 10  # until the peak
    min_lr_share: float = 0.1  # of the peak, reached at the last step
    clip_norm: float = 1.0  # 0: no clipping


@dataclass(frozen=True)
class LoraSection:
    """Low-rank adapters are trained, and the model's own weights stay as they are; without a rank all weights are."""

    rank: int | None = None  # values between the two factors of an adapter
    alpha: float | Auto = "auto"  # an adapter adds alpha / rank times its product; auto: twice the rank
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"  # projections of every block: [q_proj, v_proj]
    dora: bool = False  # DoRA: magnitudes of rows are trained apart from their directions
    quantize: Literal["none", "int8", "nf4"] = "none"  # how the frozen weights of all of a block's projections are kept
    dropout: float = 0.0  # the share of what adapters read that training leaves out

    def adapters(self, shape: ModelShape) -> Adapters | None:
        """What a model trains instead of its weights, if anything. Raises ConfigError for targets that it lacks."""
        known = tuple(shape.projections)
        targets = known if self.targets == "all-linear" else tuple(dict.fromkeys(self.targets))
        wrong = next((name for name in targets if name not in known), None)
        if wrong is not None or not targets:
            what = f"'{wrong}', which is no linear layer of" if targets else "nothing in"
            raise ConfigError(
                f"lora.targets names {what} a block of {shape.name}", hint=f"all-linear, or some of {', '.join(known)}"
            )
        if self.rank is None:
            return None
        alpha, kept = 2.0 * self.rank if self.alpha == "auto" else self.alpha, self.quantize
        return Adapters(self.rank, alpha, targets, self.dora, self.dropout, None if kept == "none" else kept)


@dataclass(frozen=True)
class DpoSection:
    """Preferences (DPO, arXiv 2305.18290): adapters learn which of two answers is chosen; the model without them is the
    reference."""

    beta: float | None = None  # how dear it is to leave the reference, 0.1 say; without one there is no DPO


@dataclass(frozen=True)
class ParallelismSection:
    """`auto` leaves it to the planner; anything else pins it."""

    pipeline: int | Auto = "auto"  # stages per replica
    tensor: int | Auto = "auto"  # 1, 2, 4 or 8 ranks of a host, that share each layer
    data: int | Auto = "auto"  # replicas
    order: Literal["auto", "given"] | tuple[str, ...] = "auto"  # of islands along the pipeline
    layers: tuple[int, ...] | None = None  # blocks per stage
    split: Literal["auto", "uniform", "holmes"] = "auto"  # of layers: by seconds, equal, by speed
    alpha: float = 1.0  # of the holmes split
    schedule: str = "auto"  # or a row of SCHEDULES
    forwards_ahead: tuple[int, ...] | Auto = "auto"  # of each stage
    recompute: Literal["auto", "none", "selective", "full"] = "auto"  # what backward computes again
    activations: Literal["auto", "device", "host"] = "auto"  # where they wait for backward; host: not with recompute
    optimizer_state: Literal["auto", "device", "host"] = "auto"  # where it is kept and updated


@dataclass(frozen=True)
class BridgeSection:
    """How islands talk; a forced transport that is impossible is an error."""

    transport: TransportKind | Auto = "auto"  # what carries the bytes
    verify: bool = False  # check every message with a checksum


@dataclass(frozen=True)
class TrainSection:
    """How long, how precise, and what to do about a loss that is not finite."""

    steps: int = 160  # of the whole run
    seed: int = 0  # of random weights
    # auto: bf16, fp16 where a device has no bf16, fp32 on CPUs; tf32: fp32 whose products are TF32
    precision: Literal["auto", "bf16", "fp16", "tf32", "fp32", "fp64"] = "auto"
    loss_scale: float | Auto = "auto"  # of fp16: where it begins, a power of two; it follows the gradients from there
    validation_samples: int = 32  # of the held-out part, each time
    validate_every: int = 0  # steps; 0: at the end alone
    patience: int | None = None  # end after so many validations in a row without a lower loss than the best before
    samples: int = 0  # held-out prompts that the model goes on from at each validation, shown and kept
    sample_tokens: int = 64  # that it goes on with at most
    on_nonfinite: Literal["stop", "skip"] = "stop"  # what a loss or gradient that is not finite does
    # optimizer: a stage's shards share out optimiser state; all: weights and gradients too; replicas: state over all
    # replicas; auto: replicas where that fits, else all
    sharded: Literal["auto", "optimizer", "all", "replicas"] = "auto"
    compile: bool = False  # torch.compile of each block: faster steps after a minute's start
    profile_step: int | None = None  # write a trace of this step (from 1) by every rank, for Perfetto
    adapt: bool = False  # accumulation counts follow measured speeds, and layers do at checkpoints
    overlap: bool = True  # sum gradients while backward goes on; false sums them after it
    timeout_s: float = 120.0  # of one operation between ranks; a silent rank is given up after it


@dataclass(frozen=True)
class CheckpointSection:
    """When to save (every so many steps, and at the end), how many to keep, and where.

    `auto` is one folder where the hosts share it, and each host's own shards where they do not (`replicate:2` with
    `--allow-missing`); `shared` insists on the first; `replicate:K` keeps every shard on K hosts, `gather:HOST` all of
    them on one host too.
    """

    every: int = 0  # steps; 0: not on the way
    last: bool = True  # save at the end
    keep: int = 2  # the newest so many
    keep_best: bool = False  # and that of the lowest validation loss: such a validation saves, whatever `every` says
    store: str = "auto"  # what the text above says


@dataclass(frozen=True)
class Recipe:
    """Everything a training run is asked to do; the defaults are the demo."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    dpo: DpoSection = field(default_factory=DpoSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    bridge: BridgeSection = field(default_factory=BridgeSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)

    def shape(self) -> ModelShape:
        """The model's shape, with its adapters. Raises ConfigError when the name says nothing."""
        shape = find_shape(self.model.name)
        return replace(shape, adapters=self.lora.adapters(shape))

    def value(self, key: str) -> Any:
        """What stands under `section.key`."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def with_paths(self, moved: Mapping[str, str]) -> Recipe:
        """The recipe on a host where data lie elsewhere: path -> path there."""
        return replace(self, data=self.data.at(lambda path: moved.get(path, path)))

    def validate(self) -> None:
        """Raise ConfigError for values that no run could use."""
        for words, fits, keys in RANGES:
            for key in keys:
                value = self.value(key)
                if isinstance(value, (int, float)) and not fits(value):
                    raise ConfigError(f"{key} must be {words}, found {value}")
        scale = self.train.loss_scale
        if scale != "auto" and not (1 <= scale <= MAX_LOSS_SCALE and frexp(scale)[0] == 0.5):
            raise ConfigError(f"train.loss_scale must be a power of two of at most 2^64, found {scale:g}")
        self._check_validates()
        step = self.train.profile_step
        if step is not None and not 1 <= step <= self.train.steps:
            raise ConfigError(f"train.profile_step must be in [1, {self.train.steps}] (train.steps), found {step}")
        schedule, known = self.parallelism.schedule, ("auto", *SCHEDULES)
        if schedule not in known:
            raise ConfigError(
                f"parallelism.schedule: {show(schedule)} is not one of the known words", hint=nearest(schedule, known)
            )
        ahead = self.parallelism.forwards_ahead
        if ahead != "auto" and (not ahead or ahead[-1] < 1 or list(ahead) != sorted(ahead, reverse=True)):
            raise ConfigError(
                "parallelism.forwards_ahead must name at least 1 for each stage, and never more than for the stage "
                f"before it, found {list(ahead)}",
                hint="for example [2, 1]: stages further ahead than earlier ones would wait for each other for ever",
            )
        wish = self.parallelism
        if wish.alpha != ParallelismSection.alpha and wish.split != "holmes":
            raise ConfigError(
                f"parallelism.alpha={wish.alpha:g} is of the holmes split, and parallelism.split is '{wish.split}'",
                hint="parallelism.split=holmes (--split holmes), or leave alpha out",
            )
        if self.lora.rank is None and self.lora != LoraSection():
            raise ConfigError(
                "lora has no rank, so nothing of it would be done", hint="lora.rank=16, or leave lora out"
            )
        if self.dpo.beta is not None and self.lora.rank is None:
            raise ConfigError(
                "dpo compares adapters with the model without them, and there are none",
                hint="lora.rank=16 (--lora 16)",
            )
        if not re.fullmatch(r"auto|shared|replicate:[1-9]\d*|gather:\S+", self.checkpoint.store):
            raise ConfigError(
                f"checkpoint.store must be auto, shared, replicate:K or gather:HOST, found '{self.checkpoint.store}'"
            )
        self._check_sources()
        for key in ("model.name", "data.source", "data.tokenizer", "data.template"):
            _check_path(key, self.value(key))
        shape = self.shape()
        if self.model.seq_len > shape.max_seq_len:
            raise ConfigError(
                f"model.seq_len {self.model.seq_len} is longer than the {shape.max_seq_len} positions of the model",
                hint="shorten model.seq_len or choose another model",
            )

    def _check_validates(self) -> None:
        for key in ("train.patience", "checkpoint.keep_best"):
            if self.value(key) and not self.train.validate_every:
                raise ConfigError(
                    f"{key} compares validations on the way, and the run makes none",
                    hint="train.validate_every=N says after how many steps",
                )

    def _check_sources(self) -> None:
        if self.data.sources and self.data.source != STDLIB:
            raise ConfigError("data.source and data.sources both say what to train on", hint="leave one of them out")
        for number, one in enumerate(self.data.sources):
            _check_path(f"data.sources[{number}].source", one.source)
            if not 0 < one.weight < inf:
                raise ConfigError(f"data.sources[{number}].weight must be finite and positive, found {one.weight}")


# What numbers may be, and under which keys. NaN fits no comparison, so it is refused everywhere.
RANGES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    (
        "at least 1",
        lambda v: v >= 1,
        (
            "model.seq_len",
            "batch.global_batch",
            "batch.micro_batch_size",
            "train.steps",
            "train.validation_samples",
            "train.sample_tokens",
            "train.patience",
            "checkpoint.keep",
            "parallelism.pipeline",
            "parallelism.tensor",
            "parallelism.data",
            "lora.rank",
        ),
    ),
    (
        "at least 0",
        lambda v: v >= 0,
        ("checkpoint.every", "train.validate_every", "train.samples", "optimizer.warmup_steps", "data.seed"),
    ),
    (f"at most {MAX_SAMPLES:,}", lambda v: v <= MAX_SAMPLES, ("batch.global_batch",)),
    ("finite and at least 0", lambda v: 0 <= v < inf, ("optimizer.clip_norm", "optimizer.weight_decay")),
    ("finite and positive", lambda v: 0 < v < inf, ("optimizer.eps", "parallelism.alpha", "lora.alpha", "dpo.beta")),
    (f"in (0, {MAX_LR:g}]", lambda v: 0 < v <= MAX_LR, ("optimizer.lr",)),
    (f"in [{SEEDS[0]}, {SEEDS[1]}]", lambda v: SEEDS[0] <= v <= SEEDS[1], ("train.seed",)),
    ("in [0, 1)", lambda v: 0 <= v < 1, ("optimizer.beta1", "optimizer.beta2", "lora.dropout")),
    ("in [0, 1]", lambda v: 0 <= v <= 1, ("optimizer.min_lr_share",)),
    ("in (0, 1)", lambda v: 0 < v < 1, ("data.validation_share",)),
    (f"in (0, {MAX_TIMEOUT_S:g}]", lambda v: 0 < v <= MAX_TIMEOUT_S, ("train.timeout_s",)),
)


def load_recipe(path: Path | None, overrides: Sequence[tuple[str, Any]] = ()) -> Recipe:
    """The recipe of a YAML file (none: the demo's defaults) with `a.b` -> value overrides. Raises ConfigError."""
    return _made(_said(path, overrides), where=path.name if path else "recipe")


def changed(recipe: Recipe, overrides: Sequence[tuple[str, Any]]) -> Recipe:
    """The recipe with `a.b` -> value overrides. Raises ConfigError."""
    return _made(_overridden(encode(recipe), overrides), where="recipe")


def _made(data: dict[str, Any], *, where: str) -> Recipe:
    """Plain data as a recipe that some run could use."""
    recipe = decode(Recipe, data, where=where)
    recipe.validate()
    if recipe.dpo.beta is not None and recipe.data.field == DataSection.field:
        recipe = replace(recipe, data=replace(recipe.data, field=PAIRS))  # rows may have texts and messages beside them
    return _with_whole_paths(_with_tokenizer(recipe, named="tokenizer" in data.get("data", {})))


def given_keys(path: Path | None, overrides: Sequence[tuple[str, Any]] = ()) -> set[str]:
    """The keys that a recipe that loads sets itself (`section.key`); all others have defaults. Raises ConfigError."""
    return {f"{section}.{key}" for section, values in _said(path, overrides).items() for key in values or ()}


def _said(path: Path | None, overrides: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """What a file and overrides say, undecoded. Raises ConfigError."""
    data = (read_yaml(path, what="recipe") if path else None) or {}
    if not isinstance(data, dict):
        hint = "sections: " + ", ".join(encode(Recipe()))
        raise ConfigError(f"{path.name if path else 'recipe'}: a recipe is keys and values", hint=hint)
    return _overridden(data, overrides)


def _overridden(data: dict[str, Any], overrides: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    for key, value in overrides:
        _set(data, key, value)
    return data


def usual_rate(shape: ModelShape, *, tunes: bool) -> float:
    """The peak learning rate where nobody gives one: of adapters, of weights that are there (it `tunes`), or of random
    ones."""
    if shape.adapters:
        return ADAPTER_RATE
    if tunes:
        return FINE_TUNING_RATE
    return min(USUAL_RATES, key=lambda row: abs(log(row[0] / shape.parameters)))[1]


def usual_length(shape: ModelShape) -> int:
    """Tokens of a sample of a real model where nobody says how many, as far as its positions allow."""
    return min(USUAL_TOKENS, shape.max_seq_len)


def usual_samples(devices: int) -> int:
    """Samples of a real model's step where nobody says how many, by how many devices there are."""
    return min(USUAL_SAMPLES * devices, MOST_USUAL_SAMPLES)


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=c` as (key, value), the value read as YAML. Raises ConfigError."""
    import yaml

    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"'{text}' is not key=value", hint="for example --set train.steps=50")
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a number of over 4,300 digits, a 13th month
        raise ConfigError(f"the value of '{text}' is not plain YAML", hint="for example --set train.steps=50") from None


def _check_path(key: str, text: str) -> None:
    """Raise ConfigError for a text that cannot be a path. Whether one that can is there is for its reader to say."""
    try:
        os.stat(text)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # it may be there for the ranks, on their hosts
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{key} cannot be used as a path: {why}, found {show(text)}") from None


def _with_tokenizer(recipe: Recipe, *, named: bool) -> Recipe:
    """The recipe with its tokenizer's whole path, so that ranks, other hosts and a later resume see the same.

    Where nobody named one, a model's folder gives its own: its weights know no other tokens.
    """
    path, folder = Path(recipe.data.tokenizer), model_folder(recipe.model.name)
    if not named and folder is not None and (folder / TOKENIZER).is_file():
        path = folder
    elif recipe.data.tokenizer == "bytes":
        return recipe
    if path.is_dir():
        path = path / TOKENIZER
    return replace(recipe, data=replace(recipe.data, tokenizer=str(path.absolute())))


def _with_whole_paths(recipe: Recipe) -> Recipe:
    """The recipe with the whole paths of its model and data: ranks do not run in the folder that a person typed in."""
    model, data = recipe.model, recipe.data
    if model.name not in SHAPES and Path(model.name).exists():
        model = replace(model, name=str(Path(model.name).absolute()))
    return replace(recipe, model=model, data=data.at(lambda path: str(Path(path).absolute())))


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = data.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"'{key}': '{section}' is not a section")
        data = inner
    data[last] = value
