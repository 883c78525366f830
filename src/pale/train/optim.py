"""Optimizer (AdamW or Muon) with timm's parameter groups, and learning rate schedule as a function of the step."""

from __future__ import annotations

from typing import TypeAlias

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler, PolyLRScheduler
from torch import nn
from torch.optim import AdamW

from ..recipes.schema import Recipe
from .muon import Muon

Schedule: TypeAlias = CosineLRScheduler | PolyLRScheduler | MultiStepLRScheduler


def make_optimizer(model: nn.Module, recipe: Recipe) -> AdamW | Muon:
    """Build the optimizer: no weight decay on norms, biases and the parameters that the model exempts.

    AdamW uses PyTorch's fused kernel, which is several times as fast as a loop over small parameters, also on a CPU.
    """
    optim = recipe.optim
    named = getattr(model, "no_weight_decay", None)
    no_decay = named() if callable(named) else set()
    if optim.layer_decay is not None:
        groups = param_groups_layer_decay(
            model, optim.weight_decay, no_decay, layer_decay=optim.layer_decay
        )
    else:
        groups = param_groups_weight_decay(model, optim.weight_decay, no_weight_decay_list=no_decay)
    if optim.name == "muon":
        tables = [p for name, p in model.named_parameters() if name in no_decay]
        return Muon(groups, recipe.peak_lr, optim.betas, optim.eps, tables)
    return AdamW(groups, recipe.peak_lr, optim.betas, optim.eps, fused=True)


def make_schedule(optimizer: AdamW | Muon, recipe: Recipe, steps: int, samples: int) -> Schedule:
    """Build the schedule: linear warm-up, then cosine, linear or step decay; `step_update(step)` sets the rates.

    Args:
        optimizer: its learning rates are set.
        recipe: settings of the run.
        steps: length of the run.
        samples: size of the training set.
    """
    warmup = recipe.warmup_steps
    if warmup is None:
        warmup = round(recipe.warmup_epochs * samples / recipe.batch)
    if recipe.optim.schedule == "steps":
        steps_per_epoch = samples / recipe.batch
        return MultiStepLRScheduler(
            optimizer,
            # timm changes the rate one step early.
            decay_t=[round(epoch * steps_per_epoch) + 1 for epoch in sorted(recipe.optim.steps_at)],
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
