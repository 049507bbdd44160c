"""What `import torch` runs of hetctl: it makes the word `het` known, lazily, and never lets an error out.

Programs that hard-code nccl may have `het` instead (HETCTL_AS_NCCL): every group that they ask for by that word, or by
none; where ranks compute on their hosts also by gloo, which programs name there. Inside one island `het` hands out the
native group, so such a program loses nothing there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from typing import Any

from hetctl.comm.contract import variables
from hetctl.comm.contract.natives import HOST


def load() -> None:
    """The entry point `torch.backends`."""
    try:
        register()
        if os.environ.get(variables.AS_NCCL) == "1":
            redirect()
    except Exception:  # an entry point that raises breaks every `import torch` on the machine
        return


def register() -> None:
    """Have the back end imported when a group is first made; calling it again changes nothing.

    A rank that was told its device type is served on that one and the host: programs ask for a group's devices, and
    what is not there cannot be used.
    """
    from torch.distributed import Backend

    from hetctl.comm.operation.device import named_device_types

    if "HET" not in Backend._plugins:
        _take_others_words()
        told = os.environ.get(variables.DEVICE_TYPE)
        devices = list(dict.fromkeys([HOST, told])) if told else named_device_types()
        Backend.register_backend("het", _create, extended_api=True, devices=devices)


def _take_others_words() -> None:
    """Let torch's `env://` meet where MPI or Slurm started the processes and nobody set torchrun's variables."""
    from hetctl.comm.contract.started import as_torchrun_says

    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers  # by name it is a function
    meet = handlers["env"]

    def handler(*args: Any, **kwargs: Any) -> Any:
        os.environ.update(as_torchrun_says(os.environ))
        return meet(*args, **kwargs)

    handlers["env"] = handler


def redirect() -> None:
    """Make torch.distributed create `het` for a device's own back end; calling it again changes nothing."""
    import torch.distributed.distributed_c10d as c10d

    original = c10d._new_process_group_helper
    if hasattr(original, "__wrapped__"):
        return
    signature = inspect.signature(original)
    on_host = os.environ.get(variables.DEVICE_TYPE, HOST) == HOST
    own = ("nccl", "gloo") if on_host else ("nccl",)  # on devices gloo is asked for beside it, for host tensors

    @functools.wraps(original)
    def helper(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        asked = str(bound.arguments["backend"])
        if asked == c10d.Backend.UNDEFINED or any(word in asked for word in own):
            bound.arguments["backend"] = c10d.Backend("het")
            bound.arguments["backend_options"] = None  # they are ProcessGroupNCCL's own
        return original(*bound.args, **bound.kwargs)

    c10d._new_process_group_helper = helper


def _create(options: Any, backend_options: Any = None) -> Any:
    from hetctl.comm.group.backend import create_over
    from hetctl.comm.group.meeting import placement_for

    return create_over(options, placement_for(options))
