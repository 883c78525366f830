"""A model in shards, where it does not fit whole: PyTorch's `fully_shard` (FSDP2), and checkpoints of its state.

Every process holds its piece of each parameter, of its moving average and of the optimizer's moments. Blocks are
gathered one at a time for the forward and the backward pass. Checkpoints are written by torch.distributed.checkpoint
as safetensors, one file for each process (its usual format keeps an index as a pickle, which is code to whoever
loads it), so that any number of processes can read them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from . import checkpoint
from .distributed import World

Models = Mapping[str, nn.Module]


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """What is gathered as one: the members of every `blocks` of a model of timm's interface, inner ones first."""
    for name, module in reversed(list(model.named_modules())):
        if name.rpartition(".")[2] == "blocks":
            yield from module.children()


def shard(
    model: nn.Module, world: World, dtype: torch.dtype | None, compiled: bool = False
) -> None:
    """Cut a model into shards on the devices of all processes; a block at a time is moved there.

    Args:
        model: whole, on the CPU, the same on each process.
        world: the processes.
        dtype: in which parameters are gathered and, by autocast, used; gradients are summed in float32.
        compiled: compile the blocks.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Inputs keep their dtype: autocast decides, as without shards.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False
    )
    for part in blocks(model):
        if compiled:  # PyTorch keeps the hooks that gather out of the graph
            part.compile()
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    """Whether `shard` cut it."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Let go of what a forward pass has gathered that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(value: Tensor) -> Tensor:
    """A tensor without shards; every process must ask."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gathered(model: nn.Module, world: World) -> dict[str, Tensor]:
    """The state of a model, whole; on the main process in the CPU's memory where it had been in shards, else empty."""
    if not is_sharded(model):
        return model.state_dict() if world.main else {}
    state = {}
    for name, value in model.state_dict().items():
        full = whole(value)
        if world.main:
            state[name] = full.cpu()
    return state


def like(value: Tensor, own: Tensor) -> Tensor:
    """A whole tensor, cut as `own` is."""
    if not isinstance(own, DTensor):
        return value
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def save(
    folder: Path,
    step: int,
    models: Models,
    optimizer: Optimizer,
    trainer: Mapping[str, Any],
    world: World,
) -> None:
    """Write a checkpoint of models in shards; every process writes its own.

    Args:
        folder: of all checkpoints of the run.
        step: how many steps are done.
        models: "model" and "ema".
        optimizer: its tensors go to the shards too, and leave None behind in trainer.pt.
        trainer: whatever else is needed to go on.
        world: the processes.
    """
    tensors = _states(models)
    state = optimizer.state_dict()
    state["state"] = {
        i: {name: None if value.ndim else value for name, value in values.items()}
        for i, values in state["state"].items()
    }
    tensors |= _moments(state["state"], optimizer, new=False)
    rest = dict(trainer) | {"optimizer": state, "models": list(models)}

    def write(path: Path) -> None:
        writer = HuggingFaceStorageWriter(str(path), save_distributed=True)
        try:
            dcp_save(tensors, storage_writer=writer)
        except CheckpointException as error:  # on every process
            raise OSError(_first(error)) from None
        if world.main:
            torch.save(rest, path / "trainer.pt")

    checkpoint.save_files(folder, step, write, world)


def restore(
    path: Path, models: Models, optimizer: Optimizer, device: torch.device
) -> dict[str, Any]:
    """Put a checkpoint into models and optimizer, and give the rest; either side may be whole or in shards."""
    shards = any(path.glob("shard-*"))
    state = checkpoint.load_trainer(path, device)
    moments, groups = state["optimizer"]["state"], state["optimizer"]["param_groups"]
    _require_same(path, groups, optimizer.param_groups)
    if shards:
        tensors = _states({n: m for n, m in models.items() if n in state["models"]})
        _fill(path, tensors | _moments(moments, optimizer, new=True))
        if "ema" in models and "ema" not in state["models"]:
            models["ema"].load_state_dict(models["model"].state_dict())
    else:
        saved = checkpoint.load_models(path)
        for name, model in models.items():
            own, values = model.state_dict(), saved.get(name, saved["model"])
            _require_shapes(path, own, values)
            model.load_state_dict({n: like(v, own[n]) for n, v in values.items()})
        for parameter, values in _by_parameter(moments, optimizer):
            for name, value in values.items():
                if value.ndim:
                    values[name] = like(value, parameter)
    # What the moments are is the checkpoint's affair; decay, betas and how to compute are the recipe's.
    for group, own_group in zip(groups, optimizer.param_groups, strict=True):
        group |= {name: value for name, value in own_group.items() if name != "params"}
    optimizer.load_state_dict(state["optimizer"])
    return state


def is_finite(model: nn.Module) -> bool:
    """Whether all that this process holds of a model are numbers."""
    values = [v.to_local() if isinstance(v, DTensor) else v for v in model.state_dict().values()]
    return all(bool(v.isfinite().all()) for v in values if v.is_floating_point())


def _require_same(path: Path, saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Moments are found by their place in the groups."""
    there, here = (sum(len(group["params"]) for group in groups) for groups in (saved, own))
    if there != here:
        raise ValueError(
            f"{path} does not fit this recipe (it holds {there} parameters, the model {here}); "
            "go on with the recipe of the run"
        )
    # Muon's groups say whether they are matrices; a model may have the same groups under both optimizers.
    kinds = [
        [(len(group["params"]), group.get("muon")) for group in groups] for groups in (saved, own)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{path} does not fit this recipe (it groups parameters otherwise); when a run goes on optim.name cannot "
            "change and optim.layer_decay cannot be set or unset, other values of optim can change"
        )


def _require_shapes(path: Path, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() | saved.keys()):
        here, there = (
            tuple(state[name].shape) if name in state else None for state in (own, saved)
        )
        if here != there:
            raise ValueError(
                f"{path} does not fit this recipe ({name} is {there} there, {here} here); the model cannot "
                "change when a run goes on, go on with the recipe of the run"
            )


def _fill(path: Path, tensors: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # One process alone reads the shards of several: no group is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp_load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
        except CheckpointException as error:
            raise ValueError(
                f"{path} does not fit this recipe ({_first(error)}); go on with the recipe of the run"
            ) from None


def _first(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"on process {rank}: {str(cause).strip().splitlines()[0]}"


def _states(models: Models) -> dict[str, Any]:
    return {
        f"{which}.{name}": value
        for which, model in models.items()
        for name, value in model.state_dict().items()
    }


def _by_parameter(
    state: dict[int, dict[str, Any]], optimizer: Optimizer
) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in state.items():
        yield parameters[i], values


def _moments(
    state: dict[int, dict[str, Any]], optimizer: Optimizer, new: bool
) -> dict[str, Tensor]:
    """What goes where `state` says None: as the optimizer holds it, or `new` and put there."""
    found: dict[str, Tensor] = {}
    for i, (parameter, values) in zip(state, _by_parameter(state, optimizer), strict=True):
        for name, value in values.items():
            if value is None:
                moment = (
                    torch.zeros_like(parameter, requires_grad=False)
                    if new
                    else optimizer.state[parameter][name]
                )
                found[f"optimizer.{i}.{name}"] = moment
                if new:
                    values[name] = moment
    return found
