"""`python -m hetctl.trainer`: one rank, started by an agent with torchrun's environment and a job file."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hetctl.comm.contract.errors import with_hints
from hetctl.comm.contract.events import Reporter
from hetctl.comm.group import autoload
from hetctl.comm.operation.device import rank_device
from hetctl.trainer.job import current_job
from hetctl.trainer.loop.loop import run
from hetctl.trainer.ranks.emulated_device import at_speed, cap_memory


@record
def main() -> None:
    """Join the job's ranks, train, leave."""
    job = current_job()
    rank = int(os.environ["RANK"])
    device = rank_device()
    cap_memory(device, job.plan.ranks[rank].memory_bytes)
    autoload.register()
    dist.init_process_group("het", timeout=timedelta(seconds=job.timeout_s))
    with at_speed(device, job.plan.ranks[rank].speed) as reduced:
        if reduced is not None:
            print(f"this device runs at {reduced}", flush=True)
        with with_hints():
            run(job, device, Reporter(active=rank == 0))
    dist.destroy_process_group()  # not after an error: peers may be gone, and leaving politely would wait for them


if __name__ == "__main__":
    main()
