"""Models optimized for inference: 16-bit weights, folded constants, blocks as a few kernels, CUDA graphs."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..compat import tree_map
from ..ops.block import inference
from ..ops.block.conv import launch_conv_norm, stack_taps
from ..ops.shortcuts import is_plain
from . import fused
from .pale_transformer import PaleBlock, PaleTransformer, PatchMerging

# Shape, strides, dtype and device of an input.
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def optimize(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, cuda_graph: bool = False
) -> nn.Module:
    """Return a copy of `model` for inference; the model itself does not change.

    On a GPU with Triton each block becomes six or seven kernels and, with many channels, cuBLAS calls. Elsewhere the
    copy computes the same as the model, in `dtype`.

    Earlier changes to the model (hooks, other layers, parametrizations) are kept: such a block is not fused. A fused
    block of the copy calls none of its layers, so hooks that are added to them later do not run.

    In a detector with a `feature_pyramid`, backbone and pyramid are optimized; the heads do not change, and autocast
    chooses their dtypes.

    Args:
        model: a `PaleTransformer`, or any module that contains one, on the device where it will run.
        dtype: dtype of weights, activations and input; the input of a detector does not change.
        cuda_graph: record the kernels of each input shape once and replay them, without the launch overhead that
            dominates the latency of small batches. Up to eight shapes are kept, each with its own activations.
    """
    if not any(isinstance(module, PaleTransformer) for module in model.modules()):
        raise TypeError(
            f"optimize takes a PaleTransformer or a module with one inside, got {type(model).__name__}"
        )
    device = next(model.parameters()).device
    if cuda_graph and device.type != "cuda":
        raise ValueError(
            f"cuda_graph=True needs a model on a CUDA device, got {device}; move it there first, or leave it out"
        )
    if any(_is_separate(module) for module in model.modules() if module is not model):
        return _optimize_parts(model, dtype, cuda_graph)
    model = fold_norms(copy.deepcopy(model).eval()).requires_grad_(False).to(dtype)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if (fast := _fuse(child, dtype, device)) is not None:
                setattr(module, name, fast)
    return Graphed(model) if cuda_graph else model


def _optimize_parts(model: nn.Module, dtype: torch.dtype, cuda_graph: bool) -> nn.Module:
    """Return a copy in which the separate parts are optimized, and nothing else."""
    model = copy.deepcopy(model).eval().requires_grad_(False)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if _is_separate(child):
                setattr(module, name, Part(optimize(child, dtype, cuda_graph), dtype))
    return model


def _is_separate(module: nn.Module) -> bool:
    """Return whether it is optimized alone: a feature pyramid, whose model stays in float32."""
    return getattr(module, "apart", False) is True and any(
        isinstance(inner, PaleTransformer) for inner in module.modules()
    )


def _fuse(module: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module | None:
    """Return the fused version of a block or of the first patch merging, or None if there is none."""
    if isinstance(module, PaleBlock):
        channels = module.norm1.normalized_shape[0]
        like = torch.empty(1, 1, 1, channels, dtype=dtype, device=device)
        return FusedBlock(module) if fused.can_fuse(module, like) else None
    if isinstance(module, PatchMerging):
        module.conv.to(memory_format=torch.channels_last)
        like = torch.empty(1, module.conv.in_channels, 1, 1, dtype=dtype, device=device)
        return FusedStem(module) if FusedStem.can_fuse(module, like) else None
    return None


def fold_norms(model: nn.Module) -> nn.Module:
    """Fold batch norms that follow a convolution in an `nn.Sequential` into its weights, in place."""
    for module in model.modules():
        plain = type(module).forward is nn.Sequential.forward  # otherwise the order may differ
        if not isinstance(module, nn.Sequential) or not plain or "forward" in vars(module):
            continue
        for i, (conv, norm) in enumerate(pairwise(module)):
            if not is_plain(conv, nn.Conv2d) or not is_plain(norm, nn.BatchNorm2d):
                continue
            if norm.running_mean is not None:
                folded = fuse_conv_bn_eval(conv, norm)
                module[i] = folded.to(memory_format=torch.channels_last)
                module[i + 1] = nn.Identity()
    return model


class FusedStem(nn.Module):
    """The `PatchMerging` of images for inference: convolution, bias and norm as one kernel."""

    MAX_CHANNELS = 4, 128  # of images, and of the map

    def __init__(self, merging: PatchMerging) -> None:
        super().__init__()
        conv, self.norm = merging.conv, merging.norm
        assert conv.bias is not None
        self.kernel, self.stride = conv.kernel_size[0], conv.stride[0]
        self.channels = conv.in_channels
        self.weights = nn.Buffer(inference.stem_weights(conv.weight))
        self.bias = conv.bias

    @classmethod
    def can_fuse(cls, merging: PatchMerging, x: Tensor) -> bool:
        """Return whether the kernel can run it on images like `x`."""
        conv, (max_in, max_out) = merging.conv, cls.MAX_CHANNELS
        few = conv.in_channels <= max_in and conv.out_channels <= max_out
        return few and conv.bias is not None and fused.can_fuse_merging(merging, x)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """(b, channels, h, w) -> (b, h / stride, w / stride, c), rounded up."""
        norm = self.norm
        affine = self.bias, norm.weight, norm.bias, norm.eps
        return inference.stem(x, self.weights, self.kernel, self.stride, *affine)


class FusedBlock(nn.Module):
    """A `PaleBlock` for inference, its weights laid out as the kernels read them."""

    def __init__(self, block: PaleBlock) -> None:
        super().__init__()
        attn, mlp = block.attn, block.mlp
        phis = attn.phi_q, attn.phi_k, attn.phi_v
        self.attn = attn
        self.has_cpe = block.cpe is not None
        if block.cpe is not None:
            self.taps_cpe = nn.Buffer(stack_taps(block.cpe.weight))
            self.bias_cpe = block.cpe.bias
        self.taps = nn.Buffer(stack_taps(*(phi.depthwise.weight for phi in phis)))
        self.norm1, self.norm2, self.fc1, self.fc2 = block.norm1, block.norm2, mlp.fc1, mlp.fc2

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        x = x.contiguous()
        attn, norm1, norm2 = self.attn, self.norm1, self.norm2
        if norm1.weight.device != x.device or self.fc2.weight.device != x.device:
            raise RuntimeError(
                f"a fused block needs its weights on the device of its input, {x.device}, got "
                f"{norm1.weight.device} and {self.fc2.weight.device}; offload the model in place of its optimized copy"
            )
        if not self.has_cpe:
            y = fused.norm(x, norm1)
        else:
            total, y = torch.empty_like(x), torch.empty_like(x)
            affine = norm1.weight, norm1.bias
            launch_conv_norm(x, self.taps_cpe, self.bias_cpe, *affine, total, y, norm1.eps)
            x = total
        pointwise = attn.phi_q.pointwise, attn.phi_k.pointwise, attn.phi_v.pointwise
        weights, biases = (p.weight for p in pointwise), (p.bias for p in pointwise)
        y = attn.attend(*inference.separable_three(y, self.taps, *weights, *biases))
        proj, fc1, fc2 = attn.proj, self.fc1, self.fc2
        affine = norm2.weight, norm2.bias
        x, y = inference.linear_norm(y, proj.weight, proj.bias, x, fc2.bias, *affine, norm2.eps)
        return inference.mlp_residual(y, fc1.weight, fc1.bias, fc2.weight, x)


class Part(nn.Module):
    """A part of a model with its own dtype; its input and output have the dtype of the rest."""

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.part, self.dtype = part, dtype

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        """Return the maps of the part for images `x`."""
        with torch.autocast(x.device.type, enabled=False):
            return tree_map(lambda y: y.to(x.dtype), self.part(x.to(self.dtype)))


class Graphed(nn.Module):
    """Replays a CUDA graph for each shape of input; other attributes are those of the model.

    Threads and streams may share it: calls run one after the other.
    """

    def __init__(self, model: nn.Module, limit: int = 8) -> None:
        super().__init__()
        self.model, self.limit = model, limit
        self.graphs: OrderedDict[Layout, tuple[torch.cuda.CUDAGraph, Tensor, Any]] = OrderedDict()
        self.weights: list[tuple[Tensor, int]] = []  # with their addresses in the recordings
        self.lock = threading.Lock()
        self.last: torch.cuda.Event | None = None  # end of the last call

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        """Return the output of the model for `x`, in new memory."""
        key = x.shape, x.stride(), x.dtype, x.device
        with self.lock:
            current = torch.cuda.current_stream(x.device)
            if self.last is not None:
                current.wait_event(self.last)
            if any(weight.data_ptr() != address for weight, address in self.weights):
                self.graphs.clear()  # the model was moved or cast
            if not self.graphs:
                self.weights = [(weight, weight.data_ptr()) for weight in self.model.parameters()]
            if key not in self.graphs:
                self.graphs[key] = self._record(x)
                while len(self.graphs) > self.limit:
                    self.graphs.popitem(last=False)
            self.graphs.move_to_end(key)
            graph, source, result = self.graphs[key]
            source.copy_(x)
            graph.replay()
            found = tree_map(torch.clone, result)
            self.last = current.record_event()
        return found

    def _record(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Any]:
        with torch.inference_mode(False):  # otherwise it could be written in inference mode only
            source = torch.empty_like(x)
        source.copy_(x)
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.model(source)
        torch.cuda.current_stream(x.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # The default stream would be one of the device that was current at the first recording of the process, and the
        # default mode forbids other threads, such as one that pins batches, to use CUDA.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            result = self.model(source)
        return graph, source, result

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "graphs": OrderedDict(),
            "weights": [],
            "lock": None,
            "last": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"lock": threading.Lock()})  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)
