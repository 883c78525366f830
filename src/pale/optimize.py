"""Models made ready for inference: 16-bit weights, constants folded, blocks as a few kernels, CUDA graphs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._pytree import tree_map

from . import fused
from .ops.block import inference
from .ops.block import triton_op as pieces
from .pale_transformer import PaleBlock, PaleTransformer, PatchMerging


def optimize(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, cuda_graph: bool = False
) -> nn.Module:
    """A copy of `model` for inference; the model itself stays as it is.

    On a GPU with Triton each block becomes six or seven kernels and, where channels are many, cuBLAS calls. Elsewhere
    the copy computes what the model does, in `dtype`.

    Of a detector on our `feature_pyramid`, backbone and pyramid are made ready; the heads stay as they are, for
    autocast to choose.

    Args:
        model: a `PaleTransformer`, or any module with one inside, on the device where it will run.
        dtype: of weights, activations and input; a detector's input stays as it was.
        cuda_graph: record the kernels of each input shape once and replay them: no launch overhead, which decides the
            latency at small batches. Up to eight shapes are kept, each with its own memory for activations.
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
    if any(_apart(child) for module in model.modules() for child in module.children()):
        model = copy.deepcopy(model).eval().requires_grad_(False)
        for module in list(model.modules()):
            for name, child in module.named_children():
                if _apart(child):
                    setattr(module, name, Part(optimize(child, dtype, cuda_graph), dtype))
        return model
    model = fold_norms(copy.deepcopy(model).eval()).requires_grad_(False).to(dtype)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, PaleBlock):
                channels = child.norm1.normalized_shape[0]
                like = torch.empty(1, 1, 1, channels, dtype=dtype, device=device)
                if fused.takes(child, like):
                    setattr(module, name, FusedBlock(child))
            elif isinstance(child, PatchMerging):
                child.conv.to(memory_format=torch.channels_last)
                like = torch.empty(1, child.conv.in_channels, 1, 1, dtype=dtype, device=device)
                if FusedStem.takes(child, like):
                    setattr(module, name, FusedStem(child))
    return Graphed(model) if cuda_graph else model


def _apart(module: nn.Module) -> bool:
    """Whether it is to be made ready alone: a feature pyramid, whose model goes on in float32."""
    return getattr(module, "apart", False) is True and any(
        isinstance(inner, PaleTransformer) for inner in module.modules()
    )


def fold_norms(model: nn.Module) -> nn.Module:
    """Put batch norms that follow a convolution in an `nn.Sequential` into its weights, in place."""
    for module in model.modules():
        plain = type(module).forward is nn.Sequential.forward  # else in another order, perhaps
        if not isinstance(module, nn.Sequential) or not plain:
            continue
        for i, (conv, norm) in enumerate(pairwise(module)):
            if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
                continue
            if norm.running_mean is not None:
                folded = fuse_conv_bn_eval(conv, norm)
                module[i] = folded.to(memory_format=torch.channels_last)
                module[i + 1] = nn.Identity()
    return model


class FusedStem(nn.Module):
    """The `PatchMerging` of images for inference: convolution, bias and norm as one kernel."""

    CHANNELS = 4, 128  # of images, and of the map

    def __init__(self, merging: PatchMerging) -> None:
        super().__init__()
        conv, self.norm = merging.conv, merging.norm
        assert conv.bias is not None
        self.kernel, self.stride = conv.kernel_size[0], conv.stride[0]
        self.channels = conv.in_channels
        self.weights = nn.Buffer(inference.stem_weights(conv.weight))
        self.bias = conv.bias

    @classmethod
    def takes(cls, merging: PatchMerging, x: Tensor) -> bool:
        """Whether the kernel can run it on images like `x`."""
        conv, (most, widest) = merging.conv, cls.CHANNELS
        few = conv.in_channels <= most and conv.out_channels <= widest
        return few and conv.bias is not None and fused.takes_merging(merging, x)

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
            self.taps_cpe = nn.Buffer(pieces._taps(block.cpe.weight))
            self.bias_cpe = block.cpe.bias
        self.taps = nn.Buffer(pieces._taps(*(phi.depthwise.weight for phi in phis)))
        self.norm1, self.norm2, self.fc1, self.fc2 = block.norm1, block.norm2, mlp.fc1, mlp.fc2

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """(b, h, w, c) -> (b, h, w, c)."""
        x = x.contiguous()
        attn, norm1, norm2 = self.attn, self.norm1, self.norm2
        if not self.has_cpe:
            y = fused.norm(x, norm1)
        else:
            total, y = torch.empty_like(x), torch.empty_like(x)
            affine = norm1.weight, norm1.bias
            pieces._conv_norm(x, self.taps_cpe, self.bias_cpe, *affine, total, y, norm1.eps)
            x = total
        pointwise = attn.phi_q.pointwise, attn.phi_k.pointwise, attn.phi_v.pointwise
        weights, biases = (p.weight for p in pointwise), (p.bias for p in pointwise)
        y = attn.attend(*inference.separable_three(y, self.taps, *weights, *biases))
        proj, fc1, fc2 = attn.proj, self.fc1, self.fc2
        affine = norm2.weight, norm2.bias
        x, y = inference.linear_norm(y, proj.weight, proj.bias, x, fc2.bias, *affine, norm2.eps)
        return inference.mlp_residual(y, fc1.weight, fc1.bias, fc2.weight, x)


class Part(nn.Module):
    """A part of a model with a dtype of its own: what it takes and gives has the dtype of the rest."""

    def __init__(self, part: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.part, self.dtype = part, dtype

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        """The part's maps of images `x`."""
        with torch.autocast(x.device.type, enabled=False):
            return tree_map(lambda y: y.to(x.dtype), self.part(x.to(self.dtype)))


class Graphed(nn.Module):
    """Replays a CUDA graph for each shape of input; everything but the call itself is the model's."""

    def __init__(self, model: nn.Module, limit: int = 8) -> None:
        super().__init__()
        self.model, self.limit = model, limit
        self.graphs: OrderedDict[Any, tuple[torch.cuda.CUDAGraph, Tensor, Any]] = OrderedDict()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        """The model's output for `x`, in memory of its own."""
        key = x.shape, x.stride(), x.dtype, x.device
        if key not in self.graphs:
            self.graphs[key] = self._record(x)
            while len(self.graphs) > self.limit:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end(key)
        graph, source, result = self.graphs[key]
        source.copy_(x)
        graph.replay()
        return tree_map(torch.clone, result)

    def _record(self, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Any]:
        source = x.clone(memory_format=torch.preserve_format)
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.model(source)
        torch.cuda.current_stream(x.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self.model(source)
        return graph, source, result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)
