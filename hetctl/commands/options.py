"""The options that several commands share, once: names, help, where help lists them, and how commands get them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hetctl.commands import completion

MOST_SECONDS = 1e7  # four months: what a person may have a command wait


def bounded(seconds: float) -> float:
    """A time to wait that clocks can be given: not `inf`, nor `nan`."""
    if not 0 <= seconds <= MOST_SECONDS:
        raise typer.BadParameter(f"{seconds:g} is not from 0 to {MOST_SECONDS:,.0f} seconds")
    return seconds


_WHERE, _WHAT, _HOW = "Where", "What", "How it is planned"

Timeout = Annotated[
    float, typer.Option("--timeout", metavar="S", min=1.0, callback=bounded, help="Seconds for each host.")
]
Recipe = Annotated[Path | None, typer.Argument(help="A recipe (YAML); left out: the demo.", show_default=False)]
ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="A cluster.yaml from `hetctl discover`.", rich_help_panel=_WHERE)
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", help="Run on this plan.yaml as it is.", rich_help_panel=_WHERE)
]
Emulate = Annotated[
    str | None,
    typer.Option(
        "--emulate",
        metavar="SPEC|F",
        help="Islands to emulate: CLASS:COUNT\\[@SPEED]\\[~MEMORY]\\[/FABRIC], ',' between islands; or a cluster.yaml.",
        rich_help_panel=_WHERE,
        autocompletion=completion.device_classes,
    ),
]
Hardware = Annotated[
    Path | None, typer.Option("--hardware", help="Device classes of your own (hardware.yaml).", rich_help_panel=_WHERE)
]
OwnDevice = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="CLASS=KEY:VALUE,..",
        help="A device class: tflops (sustained) or peak, memory, bandwidth, vendor, like, ...",
        rich_help_panel=_WHERE,
    ),
]
Link = Annotated[
    list[str] | None,
    typer.Option(
        "--link",
        metavar="A-B=NETWORK",
        help="With --emulate: what joins two islands (25GbE, roce200, ib400x8).",
        rich_help_panel=_WHERE,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|config.json",
        help="The model's shape (`hetctl models`).",
        rich_help_panel=_WHAT,
        autocompletion=completion.models,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="PATH",
        help="What to train on: conversations or text (data.source).",
        rich_help_panel=_WHAT,
    ),
]
GlobalBatch = Annotated[
    int | None, typer.Option("--global-batch", metavar="N", help="Samples per step.", rich_help_panel=_WHAT)
]
SeqLen = Annotated[int | None, typer.Option("--seq-len", metavar="N", help="Tokens per sample.", rich_help_panel=_WHAT)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="key=value", help="Any key of the recipe, e.g. train.steps=50.", rich_help_panel=_WHAT
    ),
]
Lora = Annotated[
    int | None,
    typer.Option("--lora", metavar="RANK", help="Train adapters of this rank, not the weights.", rich_help_panel=_WHAT),
]
Quantize = Annotated[
    str | None,
    typer.Option(
        "--quantize", metavar="KIND", help="With --lora: keep the weights in int8 or nf4.", rich_help_panel=_WHAT
    ),
]
Dpo = Annotated[
    float | None,
    typer.Option(
        "--dpo", metavar="BETA", help="Train adapters on preference pairs (dpo.beta, 0.1 say).", rich_help_panel=_WHAT
    ),
]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Measured costs from `hetctl bench ops`.", rich_help_panel=_HOW)
]
Speed = Annotated[
    str | None,
    typer.Option("--speed", metavar="CLASS=TFLOPS,..", help="Sustained TFLOPS per GPU.", rich_help_panel=_HOW),
]
Split = Annotated[
    str | None, typer.Option("--split", help="auto, uniform or holmes.", rich_help_panel=_HOW, show_default=False)
]
Alpha = Annotated[float | None, typer.Option("--alpha", help="Of the holmes split.", rich_help_panel=_HOW)]
Bridge = Annotated[
    str | None,
    typer.Option(
        "--bridge", help="auto, direct, rdma, tcp, shm or native; impossible ones are errors.", rich_help_panel=_HOW
    ),
]
Launcher = Annotated[
    str,
    typer.Option(
        "--launcher",
        metavar="ssh|slurm|ray|kubernetes|local|none",
        help="How hosts are entered; by default as cluster.yaml says, else SSH, in a Slurm allocation srun.",
        rich_help_panel=_WHERE,
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Leave it running in the background of this machine; see `hetctl ps`.")
]
MaybeRun = Annotated[
    str | None,
    typer.Argument(
        help="A run's name or folder (`hetctl ps -a` lists them).", show_default=False, autocompletion=completion.runs
    ),
]
MaxRestarts = Annotated[
    int, typer.Option(min=0, help="After a failure go on from the last checkpoint, at most so often.")
]
AllowMissing = Annotated[
    bool, typer.Option("--allow-missing", help="Go on without hosts that are gone, under a new plan.")
]
SkipChecks = Annotated[bool, typer.Option("--skip-checks", help="Start even if a check that the plan needs fails.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and show everything, then start nothing.")]
Only = Annotated[str | None, typer.Option(metavar="ID,..", help="Only these, by id or theme.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, the rest on stderr.")]


WHERE, WHAT, HOW = (
    ("cluster", "emulate", "hardware", "device", "link"),
    ("model", "data", "global_batch", "seq_len", "lora", "quantize", "dpo", "settings"),
    ("profile", "speed", "split", "alpha", "bridge"),
)


@dataclass(frozen=True)
class RunOptions:
    """What a command line says of where to run, what to train, and what to plan from; None: nothing."""

    recipe: Recipe = None
    cluster: ClusterFile = None
    plan: PlanFile = None
    emulate: Emulate = None
    hardware: Hardware = None
    device: OwnDevice = None
    link: Link = None
    model: Model = None
    data: Data = None
    global_batch: GlobalBatch = None
    seq_len: SeqLen = None
    lora: Lora = None
    quantize: Quantize = None
    dpo: Dpo = None
    settings: Settings = None
    profile: Profile = None
    speed: Speed = None
    split: Split = None
    alpha: Alpha = None
    bridge: Bridge = None

    @property
    def overrides(self) -> list[tuple[str, Any]]:
        """Keys of the recipe and their values: those of `--set`, then the options. Raises ConfigError."""
        from hetctl.trainer.recipe import parse_override

        named = (
            ("model.name", self.model),
            ("data.source", self.data),
            ("model.seq_len", self.seq_len),
            ("batch.global_batch", self.global_batch),
            ("lora.rank", self.lora),
            ("lora.quantize", self.quantize),
            ("dpo.beta", self.dpo),
            ("parallelism.split", self.split),
            ("parallelism.alpha", self.alpha),
            ("bridge.transport", self.bridge),
        )
        return [*map(parse_override, self.settings or ()), *((k, v) for k, v in named if v is not None)]


def words(text: str | None) -> list[str]:
    """The words of an option that takes several, separated by commas."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these fields of RunOptions as its options: it gets them together, as its first argument."""

    def give(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: Any) -> None:
            command(RunOptions(**{name: given.pop(name) for name in names}), **given)

        shared = inspect.signature(RunOptions, eval_str=True).parameters
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        every = [p.replace(kind=p.KEYWORD_ONLY) for p in (*(shared[name] for name in names), *own)]
        called.__annotations__ = {p.name: p.annotation for p in every}
        called.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        return called

    return give
