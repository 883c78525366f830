"""Forward and backward pass of a step as one CUDA graph, which the CPU launches with one call.

A recorded step reads and writes fixed addresses: inputs are copied into buffers of the graph, gradients are added to
tensors that are kept, and values that change from step to step (masks of drop path, the scale of a GradScaler) must be
tensors on the device that are written in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..compat import foreach_zero_, tree_leaves
from ..data.loader import Batch
from ..errors import SettingsError, UnavailableError

THREADS = "thread_local"  # other threads, such as the one that pins batches, may use CUDA during a recording
WARM_UP = (
    3  # eager passes before recording, which compile and select kernels and initialise libraries
)


class GraphedStep:
    """Record `compute` once and replay it on other batches of the same shapes.

    Args:
        compute: returns the loss of a batch and adds its gradients to `.grad`; only forward and backward pass.
        model: the model with these gradients; recording does not change its buffers.
        batch: an example. `compute` receives only its tensors on the device.
    """

    def __init__(self, compute: Callable[[Batch], Tensor], model: nn.Module, batch: Batch) -> None:
        self.buffers = {name: value.clone() for name, value in _on_device(batch).items()}
        if not self.buffers:
            raise ValueError("a CUDA graph needs a batch with tensors on a CUDA device, got none")
        # Keeps alive all tensors that the graph reads.
        self.compute = compute
        for parameter in model.parameters():
            parameter.grad = None
        states = [(buffer, buffer.clone()) for buffer in model.buffers()]
        device = next(iter(self.buffers.values())).device
        random = torch.cuda.get_rng_state(device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                compute(self.buffers)
        torch.cuda.current_stream(device).wait_stream(side)
        # Keep the gradients of the warm-up. A parameter without gradient has none, as without a graph.
        self.grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph, capture_error_mode=THREADS):
                self.loss = compute(self.buffers)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise _unrecordable("step", error) from error
        with torch.no_grad():
            for buffer, before in states:
                buffer.copy_(before)
        torch.cuda.set_rng_state(random, device)
        self.zero_grad()

    def __call__(self, batch: Batch) -> Tensor:
        """Return the loss and add the gradients to `.grad`."""
        given = _on_device(batch)
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        recorded = {name: tuple(value.shape) for name, value in self.buffers.items()}
        if shapes != recorded:
            raise SettingsError(
                f"a recorded step needs batches of shapes {recorded}, got {shapes}; set cuda_graph=false"
            )
        for name, value in given.items():
            self.buffers[name].copy_(value, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()

    def zero_grad(self) -> None:
        """Set the gradients to zero, in place."""
        foreach_zero_(self.grads)


def record_part(part: nn.Module, example: Tensor, dtype: torch.dtype | None) -> None:
    """Record a part of a model in training as one CUDA graph forward and one backward.

    For models whose whole step cannot be recorded. The graph overwrites its gradients, so they cannot be accumulated.

    Args:
        part: the part of the model.
        example: inputs must have its shape.
        dtype: type of mixed precision, or None.
    """
    states = [(buffer, buffer.clone()) for buffer in part.buffers()]
    random = torch.cuda.get_rng_state(example.device)
    record = torch.cuda.make_graphed_callables
    # The warm-up of make_graphed_callables would keep autograd nodes of another stream.
    options: dict[str, Any] = {"allow_unused_input": True, "num_warmup_iters": 0}
    if "capture_error_mode" in inspect.signature(record).parameters:
        options["capture_error_mode"] = THREADS
    try:
        # Do not use cached casts of the weights: the graph must cast them itself.
        with torch.autocast(
            "cuda", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False
        ):
            _warm_up(part, example)
            record(part, (example.clone(),), **options)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise _unrecordable("backbone", error) from error
    renew_accumulators(part)
    with torch.no_grad():
        for buffer, before in states:
            buffer.copy_(before)
    torch.cuda.set_rng_state(random, example.device)


def _warm_up(part: nn.Module, example: Tensor) -> None:
    """Run forward and backward pass on a side stream; keep no gradient and no autograd graph."""
    device = example.device
    parameters = [p for p in part.parameters() if p.requires_grad]
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            outputs = [x for x in tree_leaves(part(example)) if x.requires_grad]
            gradients = [torch.ones_like(x) for x in outputs]
            torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)
            del outputs
    torch.cuda.current_stream(device).wait_stream(side)


def renew_accumulators(part: nn.Module) -> None:
    """Drop the AccumulateGrad nodes of the parameters, so that the next forward pass creates them on its own stream.

    A recorded part keeps its autograd graph, and with it nodes of the stream of the recording. A backward pass on
    another stream would wait for that one, and PyTorch warns about it. A node is dropped when the data of its parameter
    changes type; the data is then set back, unchanged and at the same address. Do not use this under DDP, which has
    hooks on these nodes.
    """
    for parameter in part.parameters():
        data = parameter.data
        other = torch.float16 if data.dtype == torch.float32 else torch.float32
        parameter.data = data.new_empty(0, dtype=other)
        parameter.data = data


def _unrecordable(what: str, error: RuntimeError) -> UnavailableError:
    reason = str(error).strip().splitlines()[0]
    return UnavailableError(
        f"the {what} of this model cannot be recorded as a CUDA graph ({reason}); set cuda_graph=false. Operations "
        "that wait for the device cannot be recorded, and sometimes model.checkpointing cannot"
    )


def _on_device(batch: Batch) -> dict[str, Tensor]:
    return {n: v for n, v in batch.items() if isinstance(v, Tensor) and v.is_cuda}
