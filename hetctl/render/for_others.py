"""A plan in the words of another framework, as far as its language reaches, and what it cannot say.

All of them place ranks in a box (stages x data ranks x tensor groups), numbered with stages outermost and tensor
groups innermost, and give every data rank the same batch. A plan that is no such box is refused; what differs inside
it is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, get_args

from hetctl.comm.contract.device_class import Precision
from hetctl.comm.contract.errors import ConfigError
from hetctl.comm.contract.plan import Plan, Stage
from hetctl.comm.contract.units import listed

Framework = Literal["torchtitan", "megatron", "accelerate"]
FRAMEWORKS: tuple[str, ...] = get_args(Framework)
PIN_ONE_STAGE = "--set parallelism.pipeline=1"
_MIXED = {"bf16": "bf16", "fp16": "fp16"}  # accelerate's words; everything else is no mixture


@dataclass(frozen=True)
class Written:
    """A framework's file, and a sentence for each thing that the plan has and the file does not say."""

    name: str
    text: str
    lacks: tuple[str, ...]


@dataclass(frozen=True)
class Box:
    """The mesh that a plan fills: `parts` are its stages in order, of the first replica."""

    plan: Plan
    parts: tuple[Stage, ...]
    pipeline: int  # devices in a row; fewer than parts where schedules interleave
    replicas: int
    width: int  # data ranks of a stage
    tensor: int
    each: int  # samples of a data rank in a step
    micro: int  # of them at a time

    @property
    def order(self) -> list[int]:
        """The plan's rank of each rank that the framework counts."""
        of = [replica.stages[p].ranks for p in range(self.pipeline) for replica in self.plan.replicas]
        return [rank for ranks in of for rank in ranks]


def for_framework(plan: Plan, framework: str, precision: Precision) -> Written:
    """The file for one of FRAMEWORKS. Raises ConfigError where it cannot say the plan's shape."""
    box = _box(plan, framework)
    name, text, lacks = _WRITERS[framework](box, precision)
    return Written(name, text, (*_differences(box), *lacks))


def _box(plan: Plan, framework: str) -> Box:
    first = plan.replicas[0].stages
    cuts = {tuple(stage.layers for stage in replica.stages) for replica in plan.replicas}
    widths = {(stage.width, stage.tensor_parallel) for replica in plan.replicas for stage in replica.stages}
    if len(cuts) > 1:
        _refuse(framework, "its replicas are cut at unlike layers", PIN_ONE_STAGE)
    if len(widths) > 1:
        said = listed([f"{w} x {t}" for w, t in sorted(widths)], 4)
        _refuse(framework, f"its stages have unlike ranks (data x tensor: {said})", PIN_ONE_STAGE)
    ((width, tensor),) = widths
    data = len(plan.replicas) * width
    if plan.global_batch % data:
        _refuse(
            framework,
            f"{plan.global_batch} samples do not share out evenly over {data} data ranks",
            "another --global-batch",
        )
    each = plan.global_batch // data
    asked = min(stage.micro_batch_size // width or 1 for replica in plan.replicas for stage in replica.stages)
    pipeline = len(dict.fromkeys(stage.ranks for stage in first))
    return Box(plan, first, pipeline, len(plan.replicas), width, tensor, each, gcd(each, asked))


def _refuse(framework: str, why: str, way: str) -> None:
    raise ConfigError(f"{framework} has no words for this plan: {why}", hint=f"hetctl trains it as it is; or {way}")


def _differences(box: Box) -> list[str]:
    """What no framework's box says, where the plan has it."""
    plan, said = box.plan, list[str]()
    samples = [replica.samples for replica in plan.replicas]
    if len(set(samples)) > 1:
        shares = listed([str(n) for n in samples], 6)
        said.append(f"replicas take unlike shares ({shares} samples a step); here every data rank takes {box.each}")
    if len(modes := {stage.savings for replica in plan.replicas for stage in replica.stages}) > 1:
        said.append(f"stages save memory in unlike ways ({listed([', '.join(m) or 'none' for m in sorted(modes)], 4)})")
    if idle := [r.rank for r in plan.ranks if r.replica is None]:
        said.append(f"ranks {listed([str(r) for r in idle], 8)} are left idle; leave their devices out")
    if box.order != sorted(box.order):
        seats = listed([f"{plan.ranks[r].host}:{plan.ranks[r].device}" for r in box.order], 16)
        said.append(f"ranks are counted stage by stage: start them in the order {seats}")
    if any(stage.offload or stage.offload_activations for stage in box.parts):
        said.append("the plan keeps state or activations on the host; the file does not")
    if plan.over_replicas:
        said.append("optimiser state is shared out over all replicas; here inside one")
    return said


def _saving(box: Box) -> str:
    """The recomputation that all stages can live with."""
    asked = {stage.recompute for replica in box.plan.replicas for stage in replica.stages}
    return next(kind for kind in ("full", "selective", "none") if kind in asked)


def _torchtitan(box: Box, precision: Precision) -> tuple[str, str, list[str]]:
    """Of torchtitan 0.3: objects for a `Trainer.Config`. Interleaved stages are numbered as torch does."""
    schedules = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
    lacks = []
    if box.pipeline > 1 and box.plan.schedule not in schedules:
        lacks.append(f"the schedule {box.plan.schedule} is not torchtitan's; 1F1B stands in for it")
    if precision not in ("bf16", "fp32"):
        lacks.append(f"{precision}: torchtitan computes in bfloat16 or float32")
    layers = [[f"layers.{n}" for n in range(*stage.layers)] for stage in box.parts]
    layers[0].insert(0, "tok_embeddings")
    layers[-1] += ["norm", "lm_head"]
    parallelism: dict[str, object] = {
        "data_parallel_replicate_degree": box.replicas,
        "data_parallel_shard_degree": box.width,
        "tensor_parallel_degree": box.tensor,
        "pipeline_parallel_degree": box.pipeline,
    }
    if box.pipeline > 1:
        parallelism |= {
            "pipeline_parallel_schedule": schedules.get(box.plan.schedule, "1F1B"),
            "pipeline_parallel_microbatch_size": box.micro,
            "module_fqns_per_model_part": layers,
        }
    local = box.each if box.pipeline > 1 else box.micro
    training = {"local_batch_size": local, "global_batch_size": box.plan.global_batch, "seq_len": box.plan.seq_len}
    kinds = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()", "none": "None"}
    text = f'''"""{_title(box)}

config = dataclasses.replace(llama3_8b(), parallelism=parallelism, training=training, ...)
"""

from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

parallelism = ParallelismConfig(**{_python(parallelism)})
training = TrainingConfig(**{_python(training)})
activation_checkpoint = {kinds[_saving(box)]}
'''
    return "plan-torchtitan.py", text, lacks


def _megatron(box: Box, precision: Precision) -> tuple[str, str, list[str]]:
    """Of Megatron-LM: arguments, one a line."""
    parts = [f"t*{stage.depth}" if stage.depth else "" for stage in box.parts]
    parts[0], parts[-1] = f"E{parts[0]}", f"{parts[-1]}L" if len(parts) > 1 else f"E{parts[-1]}L"
    lacks = []
    if box.pipeline > 1 and box.plan.schedule not in ("1f1b", "interleaved"):
        lacks.append(f"the schedule {box.plan.schedule} is not Megatron's, which runs 1F1B")
    said = [
        *(f"--num-layers {box.plan.layer_count}", f"--seq-length {box.plan.seq_len}"),
        *(f"--tensor-model-parallel-size {box.tensor}", f"--pipeline-model-parallel-size {box.pipeline}"),
        *(f"--micro-batch-size {box.micro}", f"--global-batch-size {box.plan.global_batch}"),
    ]
    if box.pipeline > 1:
        said.append(f"--pipeline-model-parallel-layout {'|'.join(parts)}")
    if precision in _MIXED:
        said.append(f"--{_MIXED[precision]}")
    if box.width > 1 and any(stage.shards > 1 for stage in box.parts):
        said.append("--use-distributed-optimizer")
        if any(stage.shards > 1 and stage.whole is False for stage in box.parts):
            lacks.append("the plan shares out weights inside stages too; here the optimiser's state alone")
    if (saving := _saving(box)) == "full":
        said += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    elif saving == "selective":
        said.append("--recompute-granularity selective")
    lines = [f"# {line}".rstrip() for line in _title(box).splitlines()]
    return "plan-megatron.args", "\n".join([*lines, *said, ""]), lacks


def _accelerate(box: Box, precision: Precision) -> tuple[str, str, list[str]]:
    """Of accelerate 1.10 and later: the file that `accelerate launch --config_file` reads."""
    if box.pipeline > 1:
        _refuse("accelerate", "it has no pipeline stages", PIN_ONE_STAGE)
    ranks = [box.plan.ranks[rank] for rank in box.order]
    shards = box.width > 1 and any(stage.shards > 1 for stage in box.parts)
    on_host = {rank.device_class for rank in ranks} == {"cpu"}
    lines = [
        *(f"# {line}".rstrip() for line in _title(box).splitlines()),
        f"# per_device_train_batch_size={box.micro}, gradient_accumulation_steps={box.each // box.micro}",
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if shards or box.tensor > 1 else 'MULTI_CPU' if on_host else 'MULTI_GPU'}",
        *(f"num_machines: {len({r.host for r in ranks})}", f"num_processes: {len(ranks)}", "machine_rank: 0"),
        *(f"mixed_precision: '{_MIXED.get(precision, 'no')}'", f"use_cpu: {str(on_host).lower()}"),
    ]
    if shards or box.tensor > 1:
        lines += [
            *("fsdp_config:", "  fsdp_version: 2", "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP"),
            *("  fsdp_reshard_after_forward: true", "  fsdp_state_dict_type: SHARDED_STATE_DICT"),
            f"  fsdp_activation_checkpointing: {str(_saving(box) == 'full').lower()}",
            *("parallelism_config:", f"  parallelism_config_dp_replicate_size: {box.replicas}"),
            f"  parallelism_config_dp_shard_size: {box.width}",
            f"  parallelism_config_tp_size: {box.tensor}",
        ]
    lacks = [
        "`accelerate launch` starts ranks itself, without the bridge: between vendors, `hetctl run --as-nccl` does"
    ]
    if len({replica.samples for replica in box.plan.replicas}) > 1:
        lacks.append("hetctl.data.Sampler and hetctl.ddp.weigh give ranks unlike shares: two lines of the program")
    return "plan-accelerate.yaml", "\n".join([*lines, ""]), lacks


def _title(box: Box) -> str:
    who = {island.name: island.device_classes for island in box.plan.islands}
    islands = ", ".join(f"{name} ({listed(list(classes), 2)})" for name, classes in who.items())
    return f"hetctl's plan of {box.plan.model} over {islands}."


def _python(values: Mapping[str, object]) -> str:
    """A literal, a line for each name; numbers, texts and lists are the same in JSON."""
    return "{\n" + "".join(f"    {json.dumps(name)}: {json.dumps(value)},\n" for name, value in values.items()) + "}"


_WRITERS: dict[str, Callable[[Box, Precision], tuple[str, str, Sequence[str]]]] = {
    "torchtitan": _torchtitan,
    "megatron": _megatron,
    "accelerate": _accelerate,
}
