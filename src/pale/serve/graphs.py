"""Models as functions of preprocessed tensors, with the inputs and outputs of the files that `pale export` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..predict import Predictor
from .limits import MAX_MODEL_PIXELS

MAX_SIDE = 8192  # maximum pixels of a tensor
# Batch, height and width of two runs, from whose outputs the shapes are read.
PROBES = (1, 64, 96), (2, 96, 64)
SIZES = "batch", "height", "width"
OUTPUT_COPIES = 3  # of the outputs: of the model, as arrays, in the response
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class TensorGraph:
    """A model that takes normalised images, float32 (batch, 3, height, width), and returns tensors.

    Attributes:
        model: on the device of the predictor.
        device: that device.
        outputs: dtype and sizes of each output by name; "batch", "height" and "width" are those of the input.
        batch: maximum number of images.
        pixels: maximum number of pixels of all images together.
        side: the only height and width that the model accepts; None: any.
    """

    model: nn.Module
    device: torch.device
    outputs: dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]]
    batch: int
    pixels: int
    side: int | None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of the input, -1 for any size."""
        side = self.side or -1
        return (1 if self.batch == 1 else -1, 3, side, side)

    def output_bytes(self, size: tuple[int, int, int]) -> int:
        """Return the bytes of the outputs for a batch, height and width."""
        return sum(
            dtype.itemsize * int(np.prod(resolve(dims, size), dtype=np.int64))
            for dtype, dims in self.outputs.values()
        )

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> list[Arrays]:
        """Return the outputs for each tensor; tensors of one height and width form batches."""
        found: dict[int, Arrays] = {}
        for group in self._groups(tensors):
            images = torch.cat([tensors[i] for i in group]).to(self.device)
            outputs = _as_arrays(self.model(images))
            start = 0
            for i in group:
                end = start + len(tensors[i])
                found[i] = {
                    name: array[start:end] if dims[0] == "batch" else array
                    for array, (name, (_, dims)) in zip(outputs, self.outputs.items(), strict=True)
                }
                start = end
        return [found[i] for i in range(len(tensors))]

    def _groups(self, tensors: Sequence[Tensor]) -> Iterator[list[int]]:
        for size in dict.fromkeys(x.shape[2:] for x in tensors):
            group: list[int] = []
            count, most = 0, min(self.batch, max(1, self.pixels // size.numel()))
            for i, x in enumerate(tensors):
                if x.shape[2:] != size:
                    continue
                if group and count + len(x) > most:
                    yield group
                    group, count = [], 0
                group.append(i)
                count += len(x)
            yield group


def resolve(dims: tuple[int | str, ...], size: tuple[int, int, int]) -> tuple[int, ...]:
    """Return the sizes of an output for a batch, height and width."""
    return tuple(size[SIZES.index(d)] if isinstance(d, str) else d for d in dims)


def tensor_graph(predictor: Predictor) -> TensorGraph:
    """Return the graph of a predictor; the shapes of its outputs are read from two small runs."""
    pipeline = predictor.loaded.pipeline
    graph = pipeline.export_graph(predictor.loaded.model)
    batch = 1 if graph.single else predictor.batch_size
    model = graph.model.eval()
    side = None
    try:
        outputs = _probe(model, predictor.device, graph.outputs, PROBES, batch)
    except (RuntimeError, ValueError, AssertionError):
        # A model for one size of images, such as Swin.
        side = pipeline.export_side()
        probes = [(count, side, side) for count, _, _ in PROBES]
        outputs = _probe(model, predictor.device, graph.outputs, probes, batch)
    pixels = pipeline.max_seen(batch, MAX_MODEL_PIXELS)
    return TensorGraph(model, predictor.device, outputs, batch, pixels, side)


@torch.no_grad()
def _probe(
    model: nn.Module,
    device: torch.device,
    names: Sequence[str],
    sizes: Sequence[tuple[int, int, int]],
    batch: int,
) -> dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]]:
    sizes = [(min(count, batch), h, w) for count, h, w in sizes]
    runs = [_as_arrays(model(torch.zeros(b, 3, h, w, device=device))) for b, h, w in sizes]
    # A size that changes between the runs is that of the input which changes in the same way.
    changes = {pair: name for name, pair in zip(SIZES, zip(*sizes, strict=True), strict=True)}
    found: dict[str, tuple[np.dtype[Any], tuple[int | str, ...]]] = {}
    for name, one, other in zip(names, *runs, strict=True):
        pairs = zip(one.shape, other.shape, strict=True)
        dims = tuple(a if a == b else changes[a, b] for a, b in pairs)
        found[name] = one.dtype, dims
    return found


def _as_arrays(outputs: Any) -> list[NDArray[Any]]:
    tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    return [(x.float() if x.is_floating_point() else x.long()).cpu().numpy() for x in tensors]
