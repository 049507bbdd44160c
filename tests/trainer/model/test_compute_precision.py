"""What a recipe's precision means to torch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from hetctl.comm.contract.device_class import Precision
from hetctl.trainer.model.compute_precision import DTYPES, compute_in


@pytest.mark.parametrize("before", [False, True])
def test_products_are_tf32_where_that_is_asked_for_and_nowhere_else(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = torch.backends.cuda.matmul
    kept = matmul.allow_tf32
    try:
        for precision in (*get_args(Precision), "auto"):
            matmul.allow_tf32 = before  # as an image's environment may have it
            dtype = compute_in(precision, torch.device("cpu"))
            assert matmul.allow_tf32 == (precision == "tf32")
            assert dtype == DTYPES.get(precision, torch.float32)
    finally:
        matmul.allow_tf32 = kept
