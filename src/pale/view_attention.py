"""What a model looks at in a picture: pales, attention, rollout, Grad-CAM, as arrays.

A `Look` keeps the queries and keys of every block for one picture. Weights come from
`pale.ops.attention_weights`, the definition that the back-ends are tested against, so they are the weights
that the model summed its values with, not an approximation.

Rollout (Abnar and Zuidema, 2020) follows a token back to the first stage: each block hands on half of what
a token holds to itself (the residual) and half by the mean of its heads; each patch merging hands it on in
equal parts to the 3x3 tokens that its convolution reads. Nothing is lost: the map sums to one. MLP, values
and position encoding are left out, as in the original.

Grad-CAM (Selvaraju et al., 2017) works on the map that a stage gives, for the logit of a class; of a
segmenter, for the sum of the class's logits over the pixels it won (Seg-Grad-CAM); of a detector, for the
log-probability of the class at the region that shows it most surely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList

from . import zoo
from .data.images import read_image
from .layers import separable_convs
from .loading import Loaded, load, read_pixels
from .ops.pale_attention import attention_weights
from .ops.pale_attention.region import Region
from .pale_transformer import PaleTransformer, PSAttention
from .tasks.detection import MaskRCNN
from .tasks.detection.mask_rcnn import numbered

Array = NDArray[np.float32]
Token = tuple[int, int]  # row and column on a stage's map
SIZE, MOST_SIZE, LONGEST = (
    224,
    448,
    2.0,
)  # short side; the largest; long side at most this times the short one


@dataclass(frozen=True)
class Block:
    """Queries and keys, (h, w, heads, d), and where each token attends."""

    q: Tensor
    k: Tensor
    region: Region

    @property
    def heads(self) -> int:
        """How many."""
        return self.q.shape[2]

    def kind(self, head: int) -> str:
        """What a head attends in: row, column or pale."""
        kinds = self.region.kinds
        return kinds[head * len(kinds) // self.heads]


@dataclass(frozen=True)
class Scored:
    """A class of the picture: its number, its name, and its share.

    The share is the probability; of a segmenter, the share of the pixels; of a detector, the probability at the region
    that shows the class most surely.
    """

    number: int
    name: str
    share: float


class Glance:
    """One picture through the backbone of one model, of any task, on the CPU: what each token attends to.

    Attributes:
        loaded: the model.
        picture: as it was read.
        image: (h, w, 3), uint8: what the model was given.
        stages: the blocks of each stage.
        strides: pixels of the image from one token to the next, by stage.
    """

    def __init__(self, loaded: Loaded, picture: Image.Image, size: int) -> None:
        self.loaded, self.picture = loaded, picture
        pixels = read_pixels(picture, size, int(LONGEST * size))
        self.image: NDArray[np.uint8] = pixels.permute(1, 2, 0).numpy()
        self._backbone = backbone_of(loaded)
        config = self._backbone.config
        self.strides = [config.stem_stride * 2**i for i in range(len(config.depths))]
        self.stages: list[list[Block]] = [[] for _ in config.depths]
        handles = []
        for number, stage in enumerate(self._backbone.stages):
            for attention in (m for m in stage.modules() if isinstance(m, PSAttention)):
                handles.append(attention.register_forward_pre_hook(self._keeper(number)))
        try:
            self._run(loaded.normalise(pixels[None]))
        finally:
            for handle in handles:
                handle.remove()

    def _run(self, images: Tensor) -> None:
        with torch.no_grad():
            for stage in self._backbone.stages:
                images = stage(images)

    def _keeper(self, stage: int) -> Any:
        def keep(module: PSAttention, inputs: tuple[Tensor]) -> None:
            with torch.no_grad():
                q, k = separable_convs(inputs[0].detach(), module.phi_q, module.phi_k)
            split = [x[0].unflatten(-1, (module.heads, -1)).contiguous() for x in (q, k)]
            self.stages[stage].append(Block(split[0], split[1], module.region))

        return keep

    def token(self, point: tuple[float, float], stage: int) -> Token:
        """The token of a stage's map that holds a point (x, y), in pixels of the picture."""
        x, y = point
        width, height = self.picture.size
        if not (0 <= x < width and 0 <= y < height):
            raise ValueError(
                f"the point must lie in the picture, x in 0..{width - 1} and y in 0..{height - 1}, got {x:g} {y:g}"
            )
        h, w = self.image.shape[:2]
        stride = self.strides[self._stage(stage)]
        return int(y * h / height) // stride, int(x * w / width) // stride

    def block(self, stage: int, block: int = -1) -> Block:
        """A block, both numbers from 0; -1 is the last."""
        blocks = self.stages[self._stage(stage)]
        if not -len(blocks) <= block < len(blocks):
            raise ValueError(
                f"stage {stage + 1} has {len(blocks)} blocks and no block {block + 1}; choose from 1 to {len(blocks)} "
                f"(in Python, block=0 to {len(blocks) - 1}, got {block})"
            )
        return blocks[block]

    def weights(self, stage: int, at: Token, block: int = -1) -> Array:
        """With what weights the token `at` sums up the values, (heads, h, w); each head's sum to one."""
        chosen = self.block(stage, block)
        region = chosen.region
        with torch.no_grad():
            found = attention_weights(
                chosen.q[None],
                chosen.k[None],
                at=at,
                pale_size=region.pale_size,
                scope=region.scope,
                grouping=region.grouping,
            )
        return found[0].numpy()

    def region(self, stage: int, at: Token, block: int = -1) -> NDArray[np.bool_]:
        """The tokens that `at` attends to, (heads, h, w)."""
        chosen = self.block(stage, block)
        h, w = chosen.q.shape[:2]
        maps = {kind: chosen.region.members(kind, h, w) for kind in chosen.region.kinds}
        seen = {kind: groups[groups[:, at[0], at[1]]].any(0) for kind, groups in maps.items()}
        return torch.stack([seen[chosen.kind(n)] for n in range(chosen.heads)]).numpy()  # type: ignore[index]

    def rollout(self, stage: int, at: Token) -> Array:
        """Where in the first stage's map the token `at`, after its stage's last block, comes from; sums to one."""
        h, w = self.block(stage).q.shape[:2]
        held = torch.zeros(h * w)
        held[at[0] * w + at[1]] = 1
        for number in range(stage, -1, -1):
            for chosen in reversed(self.stages[number]):
                held = (held + handed_on(chosen, held)) / 2
            if number:
                held = unmerged(held.view(h, w), self._size(number - 1)).flatten()
                h, w = self._size(number - 1)
        return held.view(h, w).numpy()

    def _size(self, stage: int) -> tuple[int, int]:
        h, w = self.stages[stage][0].q.shape[:2]
        return h, w

    def _stage(self, stage: int) -> int:
        n = len(self.stages)
        if not -n <= stage < n:
            raise ValueError(
                f"the model has {n} stages and no stage {stage + 1}; choose from 1 to {n} "
                f"(in Python, stage=0 to {n - 1}, got {stage})"
            )
        return stage % n


class Look(Glance):
    """One picture as one model sees it, with the classes and what speaks for them; `look` makes it.

    Attributes:
        scores: the classes, best first.
    """

    def __init__(self, loaded: Loaded, picture: Image.Image, size: int) -> None:
        self._maps: list[Tensor] = []
        self._cams: dict[int, list[Array]] = {}
        super().__init__(loaded, picture, size)
        self.scores = self._score()

    def _run(self, images: Tensor) -> None:
        """The logits, with a graph, and on the way the stages' maps."""
        handles = [s.register_forward_hook(self._keep_map) for s in self._backbone.stages]
        try:
            with torch.enable_grad():
                # For Grad-CAM the maps need a graph, the weights no gradient.
                images = images.requires_grad_()
                model = self.loaded.model
                self._logits: Tensor = (
                    _surest(model, images) if isinstance(model, MaskRCNN) else model(images)
                )
        finally:
            for handle in handles:
                handle.remove()

    def _keep_map(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self._maps.append(output)

    def _score(self) -> list[Scored]:
        logits = self._logits.detach()[0]
        if self.loaded.kind == "detection":
            shares = logits.exp()
        elif logits.dim() == 1:
            shares = logits.softmax(0)
        else:
            won = logits.argmax(0).flatten()
            shares = torch.bincount(won, minlength=len(logits)) / len(won)
        names = self.loaded.classes or tuple(f"class {i}" for i in range(len(shares)))
        order = torch.argsort(-shares, stable=True)
        return [Scored(int(i), names[int(i)], float(shares[i])) for i in order]

    def grad_cam(self, number: int, stage: int = -1) -> Array:
        """Where a stage's map speaks for a class, (h, w), not below zero, on no fixed scale."""
        logits = self._logits[0]
        if not 0 <= number < len(logits):
            raise ValueError(f"the model has classes 0 to {len(logits) - 1}, got {number}")
        target = logits[number]
        if target.dim():
            won = logits.argmax(0) == number
            target = target[won].sum() if won.any() else target.sum()
        chosen = self._stage(stage)
        if number not in self._cams:  # of all stages at once: one way back through the model
            gradients = torch.autograd.grad(target, self._maps, retain_graph=True)
            self._cams[number] = [
                (g.mean((2, 3), keepdim=True) * m).sum(1)[0].detach().clamp(min=0).numpy()
                for g, m in zip(gradients, self._maps, strict=True)
            ]
        return self._cams[number][chosen]

    def class_number(self, name: str) -> int:
        """The number of a class, by name or by number."""
        for score in self.scores:
            if name in (score.name, str(score.number)):
                return score.number
        from difflib import get_close_matches

        near = get_close_matches(name, [s.name for s in self.scores], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"the model knows no class {name!r}{hint}")


def look(
    picture: str | Path | Image.Image,
    source: str | Path | nn.Module | Loaded | None = None,
    *,
    recipe: str | None = None,
    size: int | None = None,
) -> Look:
    """Show a picture to a model, and keep what it looks at.

    Args:
        picture: a file, or an RGB picture.
        source: a run's folder, weights, a model's name (untrained), or a module; by default the classifier that comes
            with the package.
        recipe: for foreign weights: the recipe that says the model.
        size: the short side is brought to this; by default the size that a classifier was trained at, else 224.
    """
    if source is None:
        source = zoo.default("classification") or "pale_tiny"
    loaded = load(source, recipe)
    size = usual_size(loaded) if size is None else size
    if not 16 <= size <= MOST_SIZE:
        raise ValueError(f"size must be in 16..{MOST_SIZE}, got {size}; every token is kept")
    if not isinstance(picture, Image.Image):
        picture = read_image(picture)
    return Look(loaded, picture.convert("RGB"), size)


def _surest(model: MaskRCNN, images: Tensor) -> Tensor:
    """Of each class, the log-probability at the region that shows it most surely, (1, classes)."""
    maps = model.body(images)
    size = (images.shape[2], images.shape[3])
    with torch.no_grad():
        found, _ = model.rpn(ImageList(images, [size]), maps)
    logits, _ = model.roi_heads._boxes(list(maps.values()), numbered(found))
    return logits.log_softmax(1)[:, 1:].amax(0, keepdim=True)


def usual_size(loaded: Loaded) -> int:
    """The short side at which pictures are looked into, unless another is asked for."""
    if loaded.kind == "classification":
        return min(loaded.size, MOST_SIZE)
    return min(loaded.short or SIZE, SIZE)


def handed_on(block: Block, held: Tensor) -> Tensor:
    """What the tokens hold, (tokens,), handed on by the mean attention of the heads: `held` times the mean matrix."""
    q, k = (x.flatten(0, 1).transpose(0, 1) for x in (block.q, block.k))  # (heads, tokens, d)
    h, w = block.q.shape[:2]
    kinds = block.region.kinds
    out = torch.zeros_like(held)
    for number, kind in enumerate(kinds):
        heads = slice(number * block.heads // len(kinds), (number + 1) * block.heads // len(kinds))
        members = block.region.members(kind, h, w).flatten(1)
        shared = held / members.sum(0) / len(kinds)  # a token of two pales gives half to each
        for group in members:
            t = group.nonzero().squeeze(1)
            scores = q[heads, t] @ k[heads, t].mT * q.shape[-1] ** -0.5
            out[t] += shared[t] @ scores.softmax(-1).mean(0)
    return out


def unmerged(held: Tensor, size: tuple[int, int]) -> Tensor:
    """What tokens hold, (h, w), given in equal parts to the tokens of the larger map that their merging reads."""
    ones = torch.ones(1, 1, 3, 3)
    readers = F.conv2d(torch.ones(1, 1, *size), ones, stride=2, padding=1)
    h, w = held.shape
    rest = size[0] - (2 * h - 1), size[1] - (2 * w - 1)
    shares = held[None, None] / readers
    return F.conv_transpose2d(shares, ones, stride=2, padding=1, output_padding=rest)[0, 0]


def backbone_of(loaded: Loaded) -> PaleTransformer:
    """The Pale Transformer inside a model of any task."""
    for module in loaded.model.modules():
        if isinstance(module, PaleTransformer):
            return module
    raise ValueError(
        f"{loaded.source} is {loaded.name}, which has no pale attention to look at; "
        "give a run or weights of a Pale model"
    )


def chosen_heads(block: Block, head: str) -> Sequence[int]:
    """The heads behind a word: "mean", "rows", "columns", or a number from 1."""
    every = range(block.heads)
    if head == "mean":
        return every
    if head in ("rows", "columns"):
        kind = head.removesuffix("s")
        found = [n for n in every if block.kind(n) == kind]
        if not found:
            raise ValueError(
                f"no head of this block attends in {head}; its heads attend in {block.kind(0)} groups"
            )
        return found
    if head.isdigit() and 1 <= int(head) <= block.heads:
        return [int(head) - 1]
    raise ValueError(
        f"head must be mean, rows, columns or a number in 1..{block.heads}, got {head!r}"
    )
