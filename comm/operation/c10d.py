"""The parts of torch.distributed whose type stubs are incomplete, under one roof and typed as what they are: Any."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

Work: Any = dist.distributed_c10d.Work
Store = Any  # its stub lacks clone()
ProcessGroup: Any = dist.ProcessGroup  # several signatures a name fit no single override
Gloo: Any = dist.ProcessGroupGloo
PrefixStore: Any = dist.distributed_c10d.PrefixStore
Reduce: Any = dist.ReduceOp.RedOpType
