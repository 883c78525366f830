"""A frozen backbone: embeddings of a folder of images, and a linear classifier fitted on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import weights as weight_files
from .data.images import Source
from .data.labelled import Labelled, batches, collate
from .data.transforms import eval_transform, normalise
from .progress import Track, silent
from .recipes import get
from .recipes.schema import Classification, parse
from .train.checkpoint import write_file


@dataclass(frozen=True)
class Features:
    """Embeddings of pictures.

    Attributes:
        vectors: (n, c), float32: the pooled features before the classifier.
        labels: (n,).
        names: the files.
        classes: names of the classes.
    """

    vectors: Tensor
    labels: Tensor
    names: Sequence[str]
    classes: Sequence[str]

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"names": json.dumps(list(self.names)), "classes": json.dumps(list(self.classes))}
        tensors = {"vectors": self.vectors, "labels": self.labels}
        write_file(path, lambda temporary: save_file(tensors, temporary, metadata=about))

    @classmethod
    def load(cls, path: Path) -> Features:
        """Read what `save` wrote."""
        if not path.is_file():
            raise ValueError(f"there is no file {path}; pale features writes one")
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                vectors, labels = file.get_tensor("vectors"), file.get_tensor("labels")
            return cls(vectors, labels, json.loads(about["names"]), json.loads(about["classes"]))
        except (SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(
                f"{path} holds no features ({error}); pale features writes them"
            ) from None


def backbone(path: Path, recipe: str | None = None) -> tuple[nn.Module, Classification]:
    """The model of a run or of weights, and the recipe that says how it sees images."""
    weights = weight_files.load(path)
    if recipe is None and "recipe" not in weights.about:
        raise ValueError(f"{path} does not say which model it is for; name a recipe: --recipe NAME")
    chosen = get(recipe) if recipe else parse(weights.about["recipe"], str(path))
    if not isinstance(chosen, Classification):
        raise ValueError(f"features need a classifier, {path} is of kind {type(chosen).__name__}")
    chosen = chosen.override({"model.weights": None, "model.new_head": False})
    classes = weights.about.get("classes")
    model = chosen.model.build(len(classes) if classes else 1000, chosen.data.size)
    weight_files.put(model, weights, path, new_head=False)
    return model.eval(), chosen


@torch.no_grad()
def extract(
    model: nn.Module,
    source: Source,
    size: int,
    crop: float,
    *,
    batch: int = 64,
    workers: int = 0,
    device: str = "cpu",
    track: Track = silent,
) -> Features:
    """Embeddings of all pictures of a source, in its order."""
    data = Labelled(source, eval_transform(size, crop), seed=0)
    keys = [(0, index) for index in range(len(source))]
    loader = DataLoader(
        data,
        batch_sampler=[keys[i : i + batch] for i in range(0, len(keys), batch)],
        collate_fn=collate,
        num_workers=workers,
    )
    model = model.to(device).eval()
    vectors = []
    for images in track(batches(loader), "looking", len(loader)):
        maps = model.forward_features(normalise(images["images"].to(device)))  # type: ignore[operator]
        vectors.append(model.forward_head(maps, pre_logits=True).float().cpu())  # type: ignore[operator]
    names = [source.name(index) for index in range(len(source))]
    return Features(torch.cat(vectors), torch.tensor(source.labels), names, list(source.classes))


@dataclass(frozen=True)
class Probe:
    """How well a linear classifier on frozen features does.

    Attributes:
        train: accuracy on what it was fitted on, per cent.
        val: accuracy on the rest, per cent.
        strength: of the penalty on its weights, chosen on a tenth of the training set.
    """

    train: float
    val: float
    strength: float


STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)


def probe(train: Features, val: Features, seed: int = 0) -> Probe:
    """Fit a linear classifier by L-BFGS on standardised features and score it.

    The penalty is chosen on a tenth of the training set, never on `val`; then all of it is fitted.
    """
    if list(train.classes) != list(val.classes):
        raise ValueError(
            f"both sets need the same classes, got {len(train.classes)} and {len(val.classes)} others; "
            "make the features of both from one data set"
        )
    mean, std = train.vectors.mean(0), train.vectors.std(0) + 1e-6
    x, y = (train.vectors - mean) / std, train.labels
    x_val, y_val = (val.vectors - mean) / std, val.labels
    order: NDArray[np.int64] = np.random.default_rng(seed).permutation(len(y))
    held = max(1, len(y) // 10)
    a, b = torch.from_numpy(order[held:]), torch.from_numpy(order[:held])
    n = len(train.classes)
    scores = {s: _accuracy(fit(x[a], y[a], n, s), x[b], y[b]) for s in STRENGTHS}
    best = max(STRENGTHS, key=lambda strength: (scores[strength], strength))
    layer = fit(x, y, n, best)
    return Probe(_accuracy(layer, x, y), _accuracy(layer, x_val, y_val), best)


def fit(x: Tensor, y: Tensor, classes: int, strength: float, steps: int = 100) -> nn.Linear:
    """Multinomial logistic regression with a squared penalty; the loss is convex, so nothing is drawn."""
    layer = nn.Linear(x.shape[1], classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-6
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(layer(x), y) + strength / 2 * layer.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return layer


@torch.no_grad()
def _accuracy(layer: nn.Linear, x: Tensor, y: Tensor) -> float:
    return 100 * float((layer(x).argmax(1) == y).float().mean())
