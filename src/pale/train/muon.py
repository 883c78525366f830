"""Muon: the step of a matrix is its momentum, made orthogonal; everything else goes as AdamW says.

The Newton-Schulz iteration is timm's. timm's optimizer, and PyTorch's, go through the matrices one by one; here all
matrices of a shape go together, in a few kernels.
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

ROUNDS = 5
COEFFICIENTS = [(3.4445, -4.7750, 2.0315)]  # of Keller Jordan's Muon, in every round
TINY = 1e-7  # a momentum of this norm is left as small as it is


class Muon(Optimizer):
    """Muon for matrices and dense kernels, the fused AdamW for the rest, at one learning rate.

    Steps of matrices are scaled to the size of AdamW's (Moonlight, arXiv 2502.16982), so that AdamW's rates hold.
    Like the fused AdamW it leaves out a step where its attribute `found_inf` is a tensor of 1.

    Args:
        groups: of parameters, with their `weight_decay`.
        lr: the learning rate.
        betas, eps: AdamW's.
        tables: parameters that are no matrices whatever their shape, such as a table of positions.
        momentum: of the matrices, Nesterov's.
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
        # `fused` tells PyTorch where the number of steps is kept.
        defaults = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "fused": True}
        super().__init__(split, defaults | {"weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step with the gradients that are there."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if group["muon"]:
                self._turn(parameters, group)
            elif parameters:
                self._adamw(parameters, group)

    def _turn(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        alike = defaultdict(list)
        for parameter in parameters:
            alike[parameter.shape].append(parameter)
        lr, decay = group["lr"], group["weight_decay"]
        for shape, mine in alike.items():
            for parameter in mine:
                if not self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            kept = [self.state[parameter]["momentum"] for parameter in mine]
            before = torch.stack(kept)
            gradient = torch.stack([p.grad for p in mine if p.grad is not None])
            momentum = before.lerp(gradient, 1 - group["momentum"])
            turned = orthogonal(gradient.lerp(momentum, group["momentum"]).flatten(2))
            step = turned.view(len(mine), *shape) * (-lr * get_lr_scale(turned.shape))
            step = step.to(before.dtype).add_(torch.stack(mine), alpha=-lr * decay)
            if self.found_inf is not None:
                skip = self.found_inf.bool()
                momentum, step = torch.where(skip, before, momentum), step.masked_fill_(skip, 0)
            torch._foreach_copy_(kept, list(momentum.unbind()))
            torch._foreach_add_(mine, list(step.unbind()))

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
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
    """Whether a parameter mixes channels: a linear layer or a dense convolution, not a depthwise one or a map."""
    return parameter.ndim >= 2 and min(parameter.shape[:2]) > 1


def orthogonal(matrices: Tensor) -> Tensor:
    """Matrices (n, a, b) with all singular values near 1; in bf16 where that is fast."""
    dtype = torch.bfloat16 if matrices.is_cuda else torch.float32
    return zeropower_via_newtonschulz(matrices, ROUNDS, COEFFICIENTS, TINY, dtype=dtype)
