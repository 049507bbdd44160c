"""What a recipe's precision means to torch: the type of weights and activations, and whether products may be TF32."""

from __future__ import annotations

import torch

from hetctl.comm.operation.device import computes_bf16

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def compute_in(precision: str, device: torch.device) -> torch.dtype:
    """What the model computes in; masters and gradients stay in fp32 (fp64 under fp64).

    Products of fp32 are TF32 in this process where that was asked for, and not where an image's environment asks
    (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE).
    """
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    if precision == "auto":
        return torch.bfloat16 if computes_bf16(device) else torch.float32
    return DTYPES[precision]
