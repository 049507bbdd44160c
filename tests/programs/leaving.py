"""How a program of these ends, so that torch's own faults over gloo stay out of what is compared."""

import gc

import torch


def leave() -> None:
    """Let the models go, then the process group.

    A process that ends with its group may abort on a busy machine. And where a model of DistributedDataParallel is the
    last to hold the group, its Reducer ends the group with the interpreter's lock in hand, for which a thread of the
    group waits: neither goes on (seen with torch 2.13 over gloo alone).
    """
    gc.collect()
    torch.distributed.destroy_process_group()
