"""Models in shards (PyTorch's `fully_shard`, FSDP2), for models that do not fit, and their checkpoints.

Every process holds a shard of each parameter, of its moving average and of the optimizer's moments. Blocks are
gathered one at a time for the forward and the backward pass. torch.distributed.checkpoint writes the checkpoints as
safetensors, one file per process (its default format has a pickled index, which can run code when it is loaded). Any
number of processes can read them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
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

from ..errors import WeightsError
from . import checkpoint
from .distributed import World

Models = Mapping[str, nn.Module]
Moments = dict[str, Tensor | None]  # of a parameter; None: in another file


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are gathered as one: the children of each `blocks` module, inner ones first."""
    for name, module in reversed(list(model.named_modules())):
        if name.rpartition(".")[2] == "blocks":
            yield from module.children()


def shard(
    model: nn.Module, world: World, dtype: torch.dtype | None, compiled: bool = False
) -> None:
    """Split a model into shards on the devices of all processes; one block at a time is moved there.

    Args:
        model: on the CPU, the same on each process.
        world: the processes.
        dtype: type in which parameters are gathered; gradients are summed in float32.
        compiled: compile the blocks.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Inputs keep their dtype: autocast casts them, as without shards.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=dtype and torch.float32, cast_forward_inputs=False
    )
    for part in blocks(model):
        if compiled:  # PyTorch keeps the gathering hooks out of the graph
            part.compile()
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model is in shards."""
    return isinstance(model, FSDPModule)


def reshard(model: nn.Module) -> None:
    """Free the parameters that a forward pass without backward pass has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_tensor(value: Tensor) -> Tensor:
    """Return the whole tensor of a sharded one; every process must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gather_state(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Return the whole state dict of a model on the main process, an empty dict on the others.

    Tensors of a model in shards are copied to the CPU. Every process must call this.
    """
    if not is_sharded(model):
        return model.state_dict() if world.main else {}
    state = {}
    for name, value in model.state_dict().items():
        full = gather_tensor(value)
        if world.main:
            state[name] = full.cpu()
    return state


def shard_like(value: Tensor, own: Tensor) -> Tensor:
    """Split a whole tensor in the same way as `own`."""
    if not isinstance(own, DTensor):
        return value
    value = value.to(own.device)
    return distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def save(
    folder: Path,
    step: int,
    models: Models,
    optimizer: Optimizer,
    trainer: Mapping[str, object],
    world: World,
) -> None:
    """Write a checkpoint of models in shards; every process writes its own shard.

    Args:
        folder: folder of all checkpoints of the run.
        step: steps done.
        models: "model" and "ema".
        optimizer: its tensors are written to the shards too; trainer.pt has None in their place.
        trainer: rest of the state.
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
            raise OSError(_first_failure(error)) from None
        if world.main:
            torch.save(rest, path / "trainer.pt")

    checkpoint.save_files(folder, step, write, world)


def restore(
    path: Path,
    models: Models,
    optimizer: Optimizer,
    device: torch.device,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
) -> dict[str, Any]:
    """Load a checkpoint into models and optimizer and return the rest; both may be in shards or not.

    Args:
        path: the checkpoint.
        models: "model" and "ema".
        optimizer: optimizer of the model.
        device: device for the tensors of the rest.
        check: called with the rest before anything changes; raises if it does not fit.
    """
    shards = any(path.glob("shard-*"))
    state = checkpoint.load_trainer(path, device)
    check(state)
    moments, groups = state["optimizer"]["state"], state["optimizer"]["param_groups"]
    _check_groups(path, groups, optimizer.param_groups)
    if shards:
        tensors = _states({n: m for n, m in models.items() if n in state["models"]})
        _fill(path, tensors | _moments(moments, optimizer, new=True))
        if "ema" in models and "ema" not in state["models"]:
            models["ema"].load_state_dict(models["model"].state_dict())
    else:
        saved = checkpoint.load_models(path)
        for name, model in models.items():
            own, values = model.state_dict(), saved.get(name, saved["model"])
            _check_shapes(path, own, values)
            model.load_state_dict({n: shard_like(v, own[n]) for n, v in values.items()})
        for parameter, own_moments in _by_parameter(moments, optimizer):
            for name, value in own_moments.items():
                if value is not None and value.ndim:
                    own_moments[name] = shard_like(value, parameter)
    # The moments come from the checkpoint; weight decay, betas and the like come from the recipe.
    for group, own_group in zip(groups, optimizer.param_groups, strict=True):
        group |= {name: value for name, value in own_group.items() if name != "params"}
    optimizer.load_state_dict(state["optimizer"])
    return state


def is_finite(model: nn.Module) -> bool:
    """Return whether all weights that this process holds are finite."""
    values = [v.to_local() if isinstance(v, DTensor) else v for v in model.state_dict().values()]
    return all(bool(v.isfinite().all()) for v in values if v.is_floating_point())


def _check_groups(path: Path, saved: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
    """Raise if the parameter groups differ: moments are identified by their position in the groups."""
    there, here = (sum(len(group["params"]) for group in groups) for groups in (saved, own))
    if there != here:
        raise WeightsError(
            f"{path} does not fit this recipe (it has {there} parameters, the model has {here}); resume with the "
            "recipe of the run"
        )
    # A model may have the same groups with both optimizers; those of Muon are marked.
    kinds = [
        [(len(group["params"]), group.get("muon")) for group in groups] for groups in (saved, own)
    ]
    if kinds[0] != kinds[1]:
        raise WeightsError(
            f"{path} does not fit this recipe (its parameter groups differ); when a run resumes, optim.name cannot "
            "change and optim.layer_decay cannot be set or unset; other settings of optim can change"
        )


def _check_shapes(path: Path, own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    for name in sorted(own.keys() | saved.keys()):
        here, there = (
            tuple(state[name].shape) if name in state else None for state in (own, saved)
        )
        if here != there:
            raise WeightsError(
                f"{path} does not fit this recipe ({name} has shape {there} there, {here} here); the model cannot "
                "change when a run resumes; resume with the recipe of the run"
            )


def _fill(path: Path, tensors: dict[str, Tensor]) -> None:
    with warnings.catch_warnings():
        # A single process reads the shards of several without a process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp_load(tensors, storage_reader=HuggingFaceStorageReader(str(path)))
        except CheckpointException as error:
            raise WeightsError(
                f"{path} does not fit this recipe ({_first_failure(error)}); resume with the recipe of the run"
            ) from None


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"on process {rank}: {str(cause).strip().splitlines()[0]}"


def _states(models: Models) -> dict[str, Tensor]:
    return {
        f"{which}.{name}": value
        for which, model in models.items()
        for name, value in model.state_dict().items()
    }


def _by_parameter(
    state: dict[int, Moments], optimizer: Optimizer
) -> Iterator[tuple[Tensor, Moments]]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, values in state.items():
        yield parameters[i], values


def _moments(state: dict[int, Moments], optimizer: Optimizer, new: bool) -> dict[str, Tensor]:
    """Return the tensors that `state` has replaced by None: those of the optimizer, or new ones, set in `state`."""
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
