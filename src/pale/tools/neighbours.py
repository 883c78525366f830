"""Classification by nearest neighbours among embeddings: a score of frozen features without anything fitted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..errors import DataError, SettingsError
from .features import Features, require_same_classes

QUERIES = 256  # images that are classified at a time
BANK = 8192  # training images that they are compared with at a time


@dataclass(frozen=True)
class NeighbourScore:
    """Accuracy of a vote of nearest neighbours.

    Attributes:
        val: accuracy on the validation set in per cent.
        k: number of neighbours that vote.
        temperature: of the weights of the votes.
    """

    val: float
    k: int
    temperature: float


def score_neighbours(
    train: Features, val: Features, k: int = 20, temperature: float = 0.07
) -> NeighbourScore:
    """Classify by the k training images with the highest cosine similarity s, whose votes weigh exp(s / temperature).

    This is the weighted vote of InstDisc (arXiv 1805.01978), with the defaults that DINO reports (arXiv 2104.14294).
    The search is exact and in double precision; its memory does not depend on the number of images.
    """
    require_same_classes(train, val)
    if not 1 <= k <= len(train.labels):
        raise SettingsError(
            f"the number of neighbours must be from 1 to {len(train.labels)}, the number of training images, got {k}"
        )
    if temperature <= 0:
        raise SettingsError(f"the temperature must be above 0, got {temperature:g}")
    for features, what in ((train, "training"), (val, "validation")):
        if not features.vectors.isfinite().all():
            raise DataError(f"the {what} features contain NaN or Inf; compute them again")
    if train.vectors.shape[1] != val.vectors.shape[1]:
        raise DataError(
            f"both sets need features of one model, got {train.vectors.shape[1]} and {val.vectors.shape[1]} values "
            "for each image"
        )
    if not len(val.labels):
        raise DataError("the validation features contain no image; compute them again")
    correct = 0
    for some, labels in zip(val.vectors.split(QUERIES), val.labels.split(QUERIES), strict=True):
        similarity, neighbours = find_neighbours(some, train.vectors, k)
        votes = similarity.new_zeros(len(some), len(train.classes))
        # The largest weight becomes 1, so that no temperature overflows.
        weights = ((similarity - similarity[:, :1]) / temperature).exp()
        votes.scatter_add_(1, train.labels[neighbours], weights)
        correct += int((votes.argmax(1) == labels).sum())
    return NeighbourScore(100 * correct / len(val.labels), k, temperature)


def find_neighbours(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return cosine similarities and indices of the k nearest rows of the bank, (q, k), nearest first."""
    unit = normalize(queries.double(), dim=1)
    best = unit.new_empty(len(queries), 0)
    where = torch.empty(len(queries), 0, dtype=torch.int64)
    for start in range(0, len(bank), BANK):
        part = normalize(bank[start : start + BANK].double(), dim=1)
        best = torch.cat([best, unit @ part.T], 1)
        indices = torch.arange(start, start + len(part)).expand(len(queries), -1)
        where = torch.cat([where, indices], 1)
        best, chosen = best.topk(min(k, best.shape[1]))
        where = where.gather(1, chosen)
    return best, where
