"""Muon: matrices are updated by their orthogonalised momentum, all other parameters by AdamW.

The Newton-Schulz iteration is timm's. The optimizers of timm and PyTorch process one matrix at a time; this one
processes all matrices of a shape together, in a few kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from timm.optim.muon import get_lr_scale, zeropower_via_newtonschulz
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from ..compat import foreach_add_, foreach_copy_

ROUNDS = 5
COEFFICIENTS = [
    (3.4445, -4.7750, 2.0315)
]  # coefficients of Keller Jordan's Muon, in every iteration
TINY = 1e-7  # added to the norm: a momentum below it stays small


class Muon(Optimizer):
    """Muon for matrices and dense kernels, fused AdamW for the rest, with one learning rate.

    Updates of matrices are scaled to the size of AdamW's (Moonlight, arXiv 2502.16982), so that AdamW's learning rates
    can be used. As in fused AdamW, a step is skipped if the attribute `found_inf` is a tensor of 1.

    Args:
        groups: parameter groups with their `weight_decay`.
        lr: learning rate.
        betas: betas of AdamW.
        eps: epsilon of AdamW.
        tables: parameters that are not matrices despite their shape, such as position embeddings.
        momentum: Nesterov momentum of the matrices.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        tables: Iterable[nn.Parameter] = (),
        momentum: float = 0.95,
    ) -> None:
        split, known = [], {id(table) for table in tables}
        for group in groups:
            for matrices in (False, True):
                mine = [
                    p for p in group["params"] if (is_matrix(p) and id(p) not in known) is matrices
                ]
                if mine:
                    split.append(group | {"params": mine, "muon": matrices})
        # With `fused`, PyTorch keeps the step count on the device.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "fused": True}
        super().__init__(split, defaults | {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["muon"]:
                self._update_matrices(parameters, group)
            elif parameters:
                self._update_others(parameters, group)

    def _update_matrices(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        by_shape = defaultdict(list)
        for parameter in parameters:
            by_shape[parameter.shape].append(parameter)
        lr, decay = group["lr"], group["weight_decay"]
        for shape, mine in by_shape.items():
            for parameter in mine:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            kept = [self.state[parameter]["momentum"] for parameter in mine]
            before = torch.stack(kept)
            gradient = torch.stack([p.grad for p in mine if p.grad is not None])
            momentum = before.lerp(gradient, 1 - group["momentum"])
            orthogonalised = orthogonalise(gradient.lerp(momentum, group["momentum"]).flatten(2))
            step = orthogonalised.view(len(mine), *shape) * (
                -lr * get_lr_scale(orthogonalised.shape)
            )
            step = step.to(before.dtype).add_(torch.stack(mine), alpha=-lr * decay)
            if self.found_inf is not None:
                skip = self.found_inf.bool()
                momentum, step = torch.where(skip, before, momentum), step.masked_fill_(skip, 0)
            foreach_copy_(kept, list(momentum.unbind()))
            foreach_add_(mine, list(step.unbind()))

    def _update_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] |= {
                    "step": torch.zeros((), device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def is_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter mixes channels: of a linear layer or a dense (not depthwise) convolution."""
    return parameter.ndim >= 2 and min(parameter.shape[:2]) > 1


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return matrices (n, a, b) with all singular values near 1; computed in bf16 on a GPU."""
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    return zeropower_via_newtonschulz(matrices, ROUNDS, COEFFICIENTS, TINY, dtype=dtype)
