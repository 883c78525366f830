"""Linear layer, alone or with the GELU that follows it.

On a CPU, for inference, oneDNN computes it in one pass; PyTorch's own linear layer copies the bias into the result
first and reads the result again for GELU (Pale-T on two cores: a tenth of the time). All else is plain PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import mm_flop, register_flop_formula

from .sizes import exporting

_ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """`x W^T + b`, or its GELU; x is (..., c_in), the result (..., c_out)."""
    if not _onednn_takes(x, weight):
        y = F.linear(x, weight, bias)
        return F.gelu(y) if gelu else y
    if torch.compiler.is_compiling():
        return opaque(x, weight, bias, gelu)
    return onednn_linear(x, weight, bias, gelu)


def _onednn_takes(x: Tensor, weight: Tensor) -> bool:
    return (
        _ONEDNN
        and not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not exporting()
        and not torch.is_autocast_enabled("cpu")
    )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """The computation by oneDNN."""
    then, how = ("gelu", "none") if gelu else ("none", "")
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, then, [], how)


# Inductor takes oneDNN's own operator only with constant weights.
_library = torch.library.Library("pale", "FRAGMENT")
_library.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias, bool gelu) -> Tensor")
_library.impl("onednn_linear", onednn_linear, "CPU")
opaque = torch.ops.pale.onednn_linear.default


@torch.library.register_fake("pale::onednn_linear", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


if _ONEDNN:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _(x: Any, weight: Any, *_: Any, **__: Any) -> int:
        return mm_flop((math.prod(x[:-1]), x[-1]), (weight[1], weight[0]))
