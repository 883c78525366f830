"""A step's forward and backward pass as one CUDA graph: the CPU launches it whole, not kernel by kernel.

Everything that a recorded step reads or writes stays where it was in memory: inputs are copied into buffers of the
graph's own, gradients are added to tensors that are kept, and what changes from step to step (masks of drop path, the
scale of a GradScaler) must be a tensor on the device that is written in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

THREADS = "thread_local"  # other threads, such as the one that pins batches, may go on while a graph is recorded
WARM_UP = 3  # eager passes before recording: kernels are compiled and chosen, libraries set up


class GraphedStep:
    """Records `compute` once and replays it on other batches of the same shapes.

    Args:
        compute: loss of a batch, having added its gradients to `.grad`; forward and backward pass, nothing else.
        model: whose gradients these are; its buffers are as before after recording.
        batch: an example. Its tensors on the device are what `compute` gets.
    """

    def __init__(
        self, compute: Callable[[dict[str, Any]], Tensor], model: nn.Module, batch: dict[str, Any]
    ) -> None:
        self.buffers = {name: value.clone() for name, value in _on_device(batch).items()}
        if not self.buffers:
            raise ValueError("a CUDA graph needs a batch with tensors on a CUDA device, got none")
        # With all that the graph reads: buffers too must stay where they are.
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
        # What the warm-up has made is kept. A parameter that no gradient reaches has none, as without a graph.
        self.grads = [p.grad for p in model.parameters() if p.grad is not None]
        self.graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self.graph, capture_error_mode=THREADS):
                self.loss = compute(self.buffers)
        except RuntimeError as error:
            raise _unrecordable("step", error) from error
        with torch.no_grad():
            for buffer, before in states:
                buffer.copy_(before)
        torch.cuda.set_rng_state(random, device)
        self.zero_grad()

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        """The loss; gradients are added to `.grad`."""
        given = _on_device(batch)
        shapes = {name: tuple(value.shape) for name, value in given.items()}
        recorded = {name: tuple(value.shape) for name, value in self.buffers.items()}
        if shapes != recorded:
            raise ValueError(
                f"a recorded step takes batches of {recorded} alone, got {shapes}; set cuda_graph=false"
            )
        for name, value in given.items():
            self.buffers[name].copy_(value, non_blocking=True)
        self.graph.replay()
        return self.loss.clone()

    def zero_grad(self) -> None:
        """Gradients to zero, in place."""
        torch._foreach_zero_(self.grads)


def record_part(part: nn.Module, example: Tensor, dtype: torch.dtype | None) -> None:
    """Make a part of a model one CUDA graph forward and one backward, in training, for inputs like the example.

    For a model whose step cannot be recorded whole. Gradients lie where the graph writes them: not to be accumulated.
    """
    states = [(buffer, buffer.clone()) for buffer in part.buffers()]
    random = torch.cuda.get_rng_state(example.device)
    record = torch.cuda.make_graphed_callables
    options: dict[str, Any] = {"allow_unused_input": True}
    if "capture_error_mode" in inspect.signature(record).parameters:
        options["capture_error_mode"] = THREADS
    try:
        # Weights that were cast to 16 bits before must not be taken: the graph casts them itself.
        with torch.autocast(
            "cuda", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False
        ):
            record(part, (example.clone(),), **options)
    except RuntimeError as error:
        raise _unrecordable("backbone", error) from error
    with torch.no_grad():
        for buffer, before in states:
            buffer.copy_(before)
    torch.cuda.set_rng_state(random, example.device)


def _unrecordable(what: str, error: RuntimeError) -> RuntimeError:
    reason = str(error).strip().splitlines()[0]
    return RuntimeError(
        f"this model's {what} cannot be recorded as a CUDA graph ({reason}); set cuda_graph=false. "
        "what waits for the device cannot be recorded, and model.checkpointing may not be"
    )


def _on_device(batch: dict[str, Any]) -> dict[str, Tensor]:
    return {n: v for n, v in batch.items() if isinstance(v, Tensor) and v.is_cuda}
