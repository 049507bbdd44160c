"""What selective recomputation makes again: counted over a real block's backward, operation by operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hetctl.trainer.model.activations import Recompute
from hetctl.trainer.model.config import find_shape
from hetctl.trainer.model.model import StageModel
from hetctl.trainer.planning.costs import LayerCosts

TOKENS = 256


class Moved(TorchDispatchMode):
    """Counts the bytes that operations read and write; views move none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, inputs: Any = (), named: Mapping[str, Any] | None = None
    ) -> Any:
        made = operation(*inputs, **(named or {}))
        read, written = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((inputs, named), made))
        known = {t.untyped_storage().data_ptr() for t in read}
        if any(t.untyped_storage().data_ptr() not in known for t in written):
            self.bytes += sum(t.nbytes for t in (*read, *written))
        return made


def moved_per_token(name: str, recompute: Recompute) -> float:
    model = StageModel(find_shape(name), (1, 2), recompute=recompute).to(torch.bfloat16)
    x = torch.randn(1, TOKENS, model.shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    y = model.layers["1"](x, *model.rotary(x, model.is_local(1)))
    with Moved() as moved:
        y.backward(torch.randn_like(y))
    return moved.bytes / TOKENS


@pytest.mark.parametrize("name", ["llama-1b", "qwen3-0.6b", "opt-125m", "olmo2-7b"])
def test_as_many_bytes_move_as_its_operations_read_and_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_kernel = lambda x, size, weight=None, eps=None: F.layer_norm(x, size, weight, None, eps or 1e-6)  # noqa: E731
    monkeypatch.setattr(F, "rms_norm", one_kernel)  # as a GPU has one for it, and the CPU none
    counted = moved_per_token(name, "selective") - moved_per_token(name, "none")
    assert LayerCosts(find_shape(name), TOKENS, selective_s=1.0)._made_again_bytes(1) == pytest.approx(
        counted, rel=0.03
    )
