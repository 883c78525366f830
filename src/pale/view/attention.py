"""Attention of a model on one image, as arrays: pales, attention weights, rollout, Grad-CAM.

An `AttentionTrace` keeps the queries and keys of every block for one image. The weights come from
`pale.ops.attention_weights`, the definition that the back-ends are tested against: they are the weights that the
model used, not an approximation.

Rollout (Abnar and Zuidema, 2020) follows the content of a token back to the first stage. Each block passes half of
it to the token itself (the residual) and half by the mean attention of its heads; each patch merging passes it in equal
parts to the 3x3 tokens that its convolution reads. The map has a sum of one. MLP, values and position encoding are
left out, as in the original.

Grad-CAM (Selvaraju et al., 2017) uses the feature map of a stage. Its target is the logit of a class for a classifier,
the sum of the class logits over the pixels of that class for a segmenter (Seg-Grad-CAM), and the log-probability of
the class in the region with the highest one for a detector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ..core.plain_json import Json
from ..data.decoding import read_image
from ..errors import SettingsError, WeightsError
from ..model.layers import separable_convs
from ..model.pale_transformer import PaleTransformer, PSAttention
from ..ops.pale_attention import attention_weights
from ..ops.pale_attention.region import Region
from ..predict.bundle import ModelBundle, load, read_pixels
from ..tasks import DEFAULT_TASK
from ..weights import zoo

Array = NDArray[np.float32]
Token = tuple[int, int]  # row and column on the map of a stage
DEFAULT_SIZE, MIN_SIZE, MAX_SIZE = 224, 16, 448  # pixels of the short side
TOP = 5  # classes in a summary
MAX_ASPECT = 2.0  # the long side is at most this times the short one


@dataclass(frozen=True)
class Block:
    """Queries and keys of a block, (h, w, heads, d), and the region of its attention."""

    q: Tensor
    k: Tensor
    region: Region

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.q.shape[2]

    def kind(self, head: int) -> str:
        """Return in which groups a head attends: row, column or pale."""
        kinds = self.region.kinds
        return kinds[head * len(kinds) // self.heads]


@dataclass(frozen=True)
class ClassScore:
    """A class and its score in the image.

    The share is a probability for a classifier, the share of the pixels for a segmenter, and for a detector the
    probability in the region with the highest one.
    """

    number: int
    name: str
    share: float


class BackboneTrace:
    """Queries and keys of every block of a backbone for one image, computed on the CPU; works for any task.

    Attributes:
        bundle: the model.
        image: the image as it was read.
        pixels: (h, w, 3), uint8: the image as the model sees it.
        stages: the blocks of each stage.
        strides: pixels from one token to the next, by stage.
    """

    def __init__(self, bundle: ModelBundle, image: Image.Image, size: int) -> None:
        self.bundle, self.image = bundle, image
        pixels = read_pixels(image, size, int(MAX_ASPECT * size))
        self.pixels: NDArray[np.uint8] = pixels.permute(1, 2, 0).numpy()
        self._backbone = find_backbone(bundle)
        config = self._backbone.config
        self.strides = [config.stem_stride * 2**i for i in range(len(config.depths))]
        self.stages: list[list[Block]] = [[] for _ in config.depths]
        handles = []
        for number, stage in enumerate(self._backbone.stages):
            for attention in (m for m in stage.modules() if isinstance(m, PSAttention)):
                handles.append(attention.register_forward_pre_hook(self._keep_block(number)))
        try:
            self._run(bundle.normalise(pixels[None]))
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, images: Tensor) -> None:
        with torch.no_grad():
            for stage in self._backbone.stages:
                images = stage(images)

    def _keep_block(self, stage: int) -> Callable[[PSAttention, tuple[Tensor]], None]:
        def keep(module: PSAttention, inputs: tuple[Tensor]) -> None:
            with torch.no_grad():
                q, k = separable_convs(inputs[0].detach(), module.phi_q, module.phi_k)
            split = [x[0].unflatten(-1, (module.heads, -1)).contiguous() for x in (q, k)]
            self.stages[stage].append(Block(split[0], split[1], module.region))

        return keep

    def token(self, point: tuple[float, float], stage: int) -> Token:
        """Return the token of a stage that contains a point (x, y), given in pixels of the image."""
        x, y = point
        width, height = self.image.size
        if not (0 <= x < width and 0 <= y < height):
            raise SettingsError(
                f"the point must lie in the image, x in 0..{width - 1} and y in 0..{height - 1}, got {x:g} {y:g}"
            )
        h, w = self.pixels.shape[:2]
        stride = self.strides[self._stage(stage)]
        return int(y * h / height) // stride, int(x * w / width) // stride

    def block(self, stage: int, block: int = -1) -> Block:
        """Return a block; both numbers count from 0, and -1 is the last block."""
        blocks = self.stages[self._stage(stage)]
        if not -len(blocks) <= block < len(blocks):
            raise SettingsError(
                f"stage {stage + 1} has {len(blocks)} blocks and no block {block + 1}; choose from 1 to {len(blocks)} "
                f"(in Python, block=0 to {len(blocks) - 1}, got {block})"
            )
        return blocks[block]

    def weights(self, stage: int, at: Token, block: int = -1) -> Array:
        """Return the attention weights of the token `at`, (heads, h, w); those of each head sum to one."""
        chosen = self.block(stage, block)
        with torch.no_grad():
            found = attention_weights(chosen.q[None], chosen.k[None], at=at, region=chosen.region)
        return found[0].numpy()

    def attended(self, stage: int, at: Token, block: int = -1) -> NDArray[np.bool_]:
        """Return which tokens the token `at` attends to, (heads, h, w)."""
        chosen = self.block(stage, block)
        h, w = chosen.q.shape[:2]
        groups = {kind: chosen.region.members(kind, h, w) for kind in chosen.region.kinds}
        masks = {str(kind): g[g[:, at[0], at[1]]].any(0) for kind, g in groups.items()}
        return torch.stack([masks[chosen.kind(n)] for n in range(chosen.heads)]).numpy()

    def rollout(self, stage: int, at: Token) -> Array:
        """Return the shares of the tokens of the first stage in the token `at`, (h, w), with a sum of one.

        The token is taken after the last block of its stage.
        """
        h, w = self.block(stage).q.shape[:2]
        shares = torch.zeros(h * w)
        shares[at[0] * w + at[1]] = 1
        for number in range(stage, -1, -1):
            for block in reversed(self.stages[number]):
                shares = (shares + propagate(block, shares)) / 2
            if number:
                size = self._map_size(number - 1)
                shares = undo_merging(shares.view(h, w), size).flatten()
                h, w = size
        return shares.view(h, w).numpy()

    def _map_size(self, stage: int) -> tuple[int, int]:
        h, w = self.stages[stage][0].q.shape[:2]
        return h, w

    def _stage(self, stage: int) -> int:
        n = len(self.stages)
        if not -n <= stage < n:
            raise SettingsError(
                f"the model has {n} stages and no stage {stage + 1}; choose from 1 to {n} "
                f"(in Python, stage=0 to {n - 1}, got {stage})"
            )
        return stage % n


class AttentionTrace(BackboneTrace):
    """A `BackboneTrace` with class scores and Grad-CAM; made by `trace_attention`.

    Attributes:
        scores: the classes, highest score first, with the preprocessing of `pale predict`: a classifier is given a
            centre crop there, whereas attention and Grad-CAM are those of the whole image.
    """

    def __init__(self, bundle: ModelBundle, image: Image.Image, size: int) -> None:
        self._maps: list[Tensor] = []
        self._cams: dict[int, list[Array]] = {}
        super().__init__(bundle, image, size)
        self.scores = self._class_scores()

    def plain(self, point: tuple[float, float]) -> Json:
        """Return the model, the token of each stage at a point, and the best classes, as a JSON object."""
        return {
            "model": self.bundle.name,
            "trained": self.bundle.trained,
            "point": point,
            "tokens": [self.token(point, stage) for stage in range(len(self.stages))],
            "maps": [list(self._map_size(stage)) for stage in range(len(self.stages))],
            "classes": [vars(score) for score in self.scores[:TOP]],
        }

    def words(self) -> str:
        """Return the best classes as a line, or a warning if the model is untrained."""
        if not self.bundle.trained:
            name = self.bundle.name
            return f"{name} is untrained, so its attention is random; give --weights RUN"
        return ", ".join(f"{score.name} {100 * score.share:.1f} %" for score in self.scores[:TOP])

    def _run(self, images: Tensor) -> None:
        """Compute the logits with a graph, and keep the map of each stage."""
        handles = [s.register_forward_hook(self._keep_map) for s in self._backbone.stages]
        try:
            with torch.enable_grad():
                # Grad-CAM needs a graph of the maps, but no gradient of the weights.
                images = images.requires_grad_()
                bundle = self.bundle
                self._logits = bundle.pipeline.trace_logits(bundle.model, images)
        finally:
            for handle in handles:
                handle.remove()

    def _keep_map(self, module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        self._maps.append(output)

    def _class_scores(self) -> list[ClassScore]:
        bundle = self.bundle
        with torch.no_grad():
            images = bundle.normalise(bundle.preprocess(self.image)[None])
            logits = bundle.pipeline.trace_logits(bundle.model, images)[0]
        shares = bundle.pipeline.trace_scores(logits)
        names = self.bundle.classes or tuple(f"class {i}" for i in range(len(shares)))
        order = torch.argsort(-shares, stable=True)
        return [ClassScore(int(i), names[int(i)], float(shares[i])) for i in order]

    def grad_cam(self, number: int, stage: int = -1) -> Array:
        """Return the Grad-CAM map of a class in a stage, (h, w), at least zero, without a fixed scale."""
        logits = self._logits[0]
        if not 0 <= number < len(logits):
            raise SettingsError(f"the model has classes 0 to {len(logits) - 1}, got {number}")
        target = logits[number]
        if target.dim():
            won = logits.argmax(0) == number
            target = target[won].sum() if won.any() else target.sum()
        chosen = self._stage(stage)
        if number not in self._cams:  # one backward pass computes the maps of all stages
            gradients = torch.autograd.grad(target, self._maps, retain_graph=True)
            self._cams[number] = [
                (g.mean((2, 3), keepdim=True) * m).sum(1)[0].detach().clamp(min=0).numpy()
                for g, m in zip(gradients, self._maps, strict=True)
            ]
        return self._cams[number][chosen]

    def class_number(self, name: str) -> int:
        """Return the number of a class, given by name or by number."""
        for score in self.scores:
            if name in (score.name, str(score.number)):
                return score.number
        near = get_close_matches(name, [s.name for s in self.scores], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"the model has no class {name!r}{hint}")


def trace_attention(
    image: str | Path | Image.Image,
    source: str | Path | nn.Module | ModelBundle | None = None,
    *,
    recipe: str | None = None,
    size: int | None = None,
) -> AttentionTrace:
    """Run a model on an image and keep its attention.

    Args:
        image: a file, or a Pillow image.
        source: a run folder, weights, a model name (untrained) or a module; default: the included classifier.
        recipe: name of the recipe of the model, for weights without one.
        size: short side of the image for the model; default: the training size of a classifier, otherwise 224.
    """
    if source is None:
        source = zoo.default_name(DEFAULT_TASK) or "pale_tiny"
    bundle = load(source, recipe)
    size = default_size(bundle) if size is None else size
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise SettingsError(
            f"size must be in {MIN_SIZE}..{MAX_SIZE}, got {size}; every token is kept in memory"
        )
    if not isinstance(image, Image.Image):
        image = read_image(image)
    return AttentionTrace(bundle, image.convert("RGB"), size)


def default_size(bundle: ModelBundle) -> int:
    """Return the default short side of traced images."""
    return bundle.pipeline.trace_size(DEFAULT_SIZE, MAX_SIZE)


def propagate(block: Block, shares: Tensor) -> Tensor:
    """Pass the shares of the tokens, (tokens,), on by the mean attention of the heads: shares @ mean matrix."""
    q, k = (x.flatten(0, 1).transpose(0, 1) for x in (block.q, block.k))  # (heads, tokens, d)
    h, w = block.q.shape[:2]
    kinds = block.region.kinds
    out = torch.zeros_like(shares)
    for number, kind in enumerate(kinds):
        heads = slice(number * block.heads // len(kinds), (number + 1) * block.heads // len(kinds))
        members = block.region.members(kind, h, w).flatten(1)
        split = shares / members.sum(0) / len(kinds)  # a token of two pales passes half to each
        for group in members:
            t = group.nonzero().squeeze(1)
            scores = q[heads, t] @ k[heads, t].mT * q.shape[-1] ** -0.5
            out[t] += split[t] @ scores.softmax(-1).mean(0)
    return out


def undo_merging(shares: Tensor, size: tuple[int, int]) -> Tensor:
    """Distribute the share of each token, (h, w), equally over the tokens of the larger map that its merging reads."""
    ones = torch.ones(1, 1, 3, 3)
    read = F.conv2d(torch.ones(1, 1, *size), ones, stride=2, padding=1)
    h, w = shares.shape
    rest = size[0] - (2 * h - 1), size[1] - (2 * w - 1)
    split = shares[None, None] / read
    return F.conv_transpose2d(split, ones, stride=2, padding=1, output_padding=rest)[0, 0]


def find_backbone(bundle: ModelBundle) -> PaleTransformer:
    """Return the Pale Transformer inside a model of any task."""
    for module in bundle.model.modules():
        if isinstance(module, PaleTransformer):
            return module
    raise WeightsError(
        f"{bundle.source} is {bundle.name}, which has no pale attention to show; "
        "give a run or weights of a Pale model"
    )


def select_heads(block: Block, head: str) -> Sequence[int]:
    """Return the heads that an option selects: "mean", "rows", "columns", or a number from 1."""
    every = range(block.heads)
    if head == "mean":
        return every
    if head in ("rows", "columns"):
        kind = head.removesuffix("s")
        found = [n for n in every if block.kind(n) == kind]
        if not found:
            raise SettingsError(
                f"no head of this block attends in {head}; its heads attend in {block.kind(0)} groups"
            )
        return found
    if head.isdigit() and 1 <= int(head) <= block.heads:
        return [int(head) - 1]
    raise SettingsError(
        f"head must be mean, rows, columns or a number in 1..{block.heads}, got {head!r}"
    )
