"""Programs that hard-code nccl: every group they ask for by that word (or by none) becomes a `het` group.

Inside one island `het` hands out the native group, so such a program loses nothing there.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.distributed.distributed_c10d as c10d


def redirect() -> None:
    """Make torch.distributed create `het` where a program asks for nccl; calling it again changes nothing."""
    original = c10d._new_process_group_helper
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = str(bound.arguments["backend"])
        if asked == c10d.Backend.UNDEFINED or "nccl" in asked:
            bound.arguments["backend"] = c10d.Backend("het")
            bound.arguments["backend_options"] = None  # they are ProcessGroupNCCL's own
        return original(*bound.args, **bound.kwargs)

    c10d._new_process_group_helper = helper
