"""AdamW or Muon with timm's parameter groups, and timm's schedules as functions of the step."""

from __future__ import annotations

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from torch import nn
from torch.optim import AdamW

from ..recipes.schema import Recipe
from .muon import Muon


def optimizer(model: nn.Module, recipe: Recipe) -> AdamW | Muon:
    """The recipe's: no decay on norms, biases and what the model names; learning rates by layer where asked for.

    AdamW is PyTorch's fused kernel: on a CPU, too, several times as fast as a loop over small parameters.
    """
    optim = recipe.optim
    named = getattr(model, "no_weight_decay", None)
    spared = named() if callable(named) else set()
    if optim.layer_decay is not None:
        groups = param_groups_layer_decay(
            model, optim.weight_decay, spared, layer_decay=optim.layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, optim.weight_decay, no_weight_decay_list=spared)
    if optim.name == "muon":
        tables = [p for name, p in model.named_parameters() if name in spared]
        return Muon(groups, recipe.peak_lr, optim.betas, optim.eps, tables)
    return AdamW(groups, recipe.peak_lr, optim.betas, optim.eps, fused=True)


def schedule(
    optimizer: AdamW | Muon, recipe: Recipe, steps: int, samples: int
) -> CosineLRScheduler | PolyLRScheduler | MultiStepLRScheduler:
    """Linear warm-up, then cosine, a straight line or steps to the last step; `step_update(step)` sets the rates."""
    warmup = recipe.warmup_steps
    if warmup is None:
        warmup = round(recipe.warmup_epochs * samples / recipe.batch)
    if recipe.optim.schedule == "steps":
        each = samples / recipe.batch
        return MultiStepLRScheduler(
            optimizer,
            # timm steps down one update early.
            decay_t=[round(epoch * each) + 1 for epoch in sorted(recipe.optim.steps_at)],
            decay_rate=recipe.optim.step_factor,
            warmup_t=min(warmup, steps - 1),
            warmup_lr_init=recipe.optim.warmup_lr * recipe.lr_factor,
            warmup_prefix=False,
            t_in_epochs=False,
        )
    common = {
        "t_initial": max(steps, 2),
        "lr_min": recipe.optim.min_lr * recipe.lr_factor,
        "warmup_t": min(warmup, steps - 1),
        "warmup_lr_init": recipe.optim.warmup_lr * recipe.lr_factor,
        "t_in_epochs": False,
    }
    if recipe.optim.schedule == "linear":
        return PolyLRScheduler(optimizer, power=1.0, **common)
    return CosineLRScheduler(optimizer, **common)
