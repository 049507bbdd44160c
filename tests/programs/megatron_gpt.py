"""A program as people have it: a GPT of Megatron-core, in pipeline stages or replicas. Its losses are the last line.

torchrun ... megatron_gpt.py FOLDER pipeline|data     on GPUs: Megatron-core computes nowhere else
"""

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

WORDS, LENGTH, SAMPLES, STEPS = 96, 64, 8, 8


def samples(step: int, first: int, count: int):
    """Micro-batches of one sample: the same whichever rank asks."""
    random = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=random)[first : first + count].cuda()
    places = torch.arange(LENGTH).unsqueeze(0).cuda()
    for row in tokens:
        yield {"tokens": row[None, :-1], "labels": row[None, 1:], "places": places}


def forward(batches, model):
    batch = next(batches)
    losses = model(batch["tokens"], batch["places"], None, labels=batch["labels"])
    return losses, partial(lambda out: (out.mean(), {"loss": out.mean().detach()}))


def main() -> None:
    local = int(os.environ.get("HETCTL_DEVICE_INDEX", os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    world, stages = dist.get_world_size(), dist.get_world_size() if sys.argv[2] == "pipeline" else 1
    parallel_state.initialize_model_parallel(1, stages)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        WORDS,
        LENGTH,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
    ).cuda()
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])
    run, losses = get_forward_backward_func(), []
    share = SAMPLES * stages // world
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = run(
            forward_step_func=forward,
            data_iterator=samples(step, parallel_state.get_data_parallel_rank() * share, share),
            model=model,
            num_microbatches=share,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        optimizer.step()
        mean = torch.stack([one["loss"] for one in found]).mean() if last else torch.zeros((), device="cuda")
        dist.all_reduce(mean)  # of the stages only the last one has it
        losses.append(float(mean) / (1 if stages > 1 else world))
    if dist.get_rank() == 0:
        print(json.dumps({"backend": dist.get_backend(), "losses": losses}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
