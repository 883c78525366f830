"""Linear layer, alone or fused with the GELU after it.

For inference on a CPU, oneDNN computes both in one pass; PyTorch's own linear layer copies the bias into the result
first and reads the result again for GELU (a tenth of the time of a Pale-T on two cores). Everything else is plain
PyTorch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat import count_dispatch_modes, onednn_linear_pointwise
from .shortcuts import is_transformed
from .sizes import exporting

_ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, gelu: bool = False) -> Tensor:
    """Return `x W^T + b`, or its GELU; x is (..., c_in), the result (..., c_out)."""
    return (onednn if can_use_onednn(x) else native)(x, weight, bias, gelu)


def native(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """Compute it with PyTorch's own operators."""
    y = F.linear(x, weight, bias)
    return F.gelu(y) if gelu else y


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
    """Compute it with oneDNN if the weights allow it; `x` must pass `can_use_onednn`."""
    plain = type(weight) is nn.Parameter or type(weight) is Tensor
    if not plain or weight.dtype != x.dtype or weight.device != x.device:
        return native(x, weight, bias, gelu)
    if torch.compiler.is_compiling():
        return opaque(x, weight, bias, gelu)
    return onednn_linear(x, weight, bias, gelu)


def can_use_onednn(x: Tensor) -> bool:
    """Return whether oneDNN can compute linear layers of `x`: an ordinary tensor in float32, for inference.

    Tracers, transforms of `torch.func` and dispatch modes do not know its operator.
    """
    return (
        _ONEDNN
        and not torch.is_grad_enabled()
        and type(x) is Tensor
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not exporting()
        and not torch.is_autocast_enabled("cpu")
        and not is_transformed(x)
        and (torch.compiler.is_compiling() or not count_dispatch_modes())
    )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    """Call oneDNN's operator."""
    then, how = ("gelu", "none") if gelu else ("none", "")
    return onednn_linear_pointwise(x, weight, bias, then, [], how)


# Inductor accepts oneDNN's own operator only with constant weights.
_library = torch.library.Library("pale", "FRAGMENT")
_library.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias, bool gelu) -> Tensor")
_library.impl("onednn_linear", onednn_linear, "CPU")
opaque = torch.ops.pale.onednn_linear.default


@torch.library.register_fake("pale::onednn_linear", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
