"""One rank of a parity check: some fp64 steps on samples of uneven length, each step's loss and norm told in full.

The same program runs across islands and in one process; `hetctl.bench.parity` starts both and compares.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hetctl.comm.contract.events import Reporter
from hetctl.comm.group import autoload, backend
from hetctl.comm.operation.device import rank_device
from hetctl.trainer.bench.samples import UnevenSamples
from hetctl.trainer.job import current_job
from hetctl.trainer.loop.build import build


@record
def main() -> None:
    """Train the job's steps over `het`; rank 0 reports."""
    job, device = current_job(), rank_device()
    autoload.register()
    dist.init_process_group("het", timeout=timedelta(seconds=job.timeout_s))
    trainer = build(job, device, training=UnevenSamples(job.shape.vocab, job.plan.seq_len))
    figures = []
    for step in range(job.recipe.train.steps):
        figures.append(trainer.train_step(step))
        trainer.timeline.end_step()
    trainer.batches.close()
    trainer.gradients.close()
    losses, norms = [f.loss for f in figures], [f.grad_norm for f in figures]
    sent = backend.bridge_bytes()
    Reporter(active=True).figures("sent", bytes=sent)
    Reporter(active=dist.get_rank() == 0).figures("result", losses=losses, norms=norms)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
