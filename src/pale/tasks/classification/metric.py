"""Top-1 and top-5 accuracy, mean average precision of tags, and both by source."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ...data.sources.mixture import Mixture
from ..base import Batch
from ..prediction import Json
from .loss import SourceClasses, mixture_loss

Guess = tuple[float, int, int, int]  # loss or probability, sample, label, guess
# Sums, confusion matrix, mistakes by loss; mistakes and hits by probability.
TopKState = tuple[Tensor, Tensor, list[Guess], tuple[list[Guess], list[Guess]]]
# Sums by source, and scores and labels of tags by source.
SourceState = tuple[Tensor, dict[int, list[tuple[Tensor, Tensor]]]]


class TopK:
    """Top-1 and top-5 accuracy and the loss, and for the report the confusion matrix, mistakes and hits."""

    MISTAKES = 24  # and hits

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.classes = names, len(names)
        self.sums: Tensor | None = None  # images, top-1, top-5, loss
        self.confusion: Tensor | None = None  # [label, guess]
        self.mistakes: list[Guess] = []  # by loss
        # Mistakes and hits by the probability of the guess.
        self.confident: tuple[list[Guess], list[Guess]] = ([], [])
        self.total_confusion: Tensor = torch.zeros(0)
        self.worst: list[Guess] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add one batch."""
        labels: Tensor = batch["labels"]
        logits = model(batch["images"]).float()
        loss = F.cross_entropy(logits, labels, reduction="none")
        guesses = logits.topk(min(5, self.classes)).indices
        hits = guesses == labels[:, None]
        sums = torch.stack(
            [
                torch.ones_like(loss).sum(),
                hits[:, 0].float().sum(),
                hits.any(1).float().sum(),
                loss.sum(),
            ]
        ).double()
        cells = (labels * self.classes + guesses[:, 0]).bincount(minlength=self.classes**2)
        self.sums = sums if self.sums is None else self.sums + sums
        self.confusion = cells if self.confusion is None else self.confusion + cells
        samples, guess = batch["keys"][:, 1], guesses[:, 0]
        wrong = (~hits[:, 0]).nonzero()[:, 0]
        rows = _rows(wrong, loss, samples, labels, guess)
        self.mistakes = sorted([*self.mistakes, *rows], reverse=True)[: self.MISTAKES]
        certainty = logits.softmax(1).gather(1, guesses[:, :1])[:, 0]
        for kept, chosen in zip(self.confident, (~hits[:, 0], hits[:, 0]), strict=True):
            best = torch.where(chosen & certainty.isfinite(), certainty, -1).sort(
                descending=True, stable=True
            )
            most = best.indices[: self.MISTAKES][best.values[: self.MISTAKES] >= 0]
            rows = _rows(most, certainty, samples, labels, guess)
            kept[:] = by_confidence([*kept, *rows], self.MISTAKES)

    def state(self) -> TopKState:
        """Return sums, confusion matrix, mistakes and hits."""
        if self.sums is None or self.confusion is None:
            return torch.zeros(4).double(), torch.zeros(self.classes**2).long(), [], ([], [])
        return self.sums.cpu(), self.confusion.cpu(), self.mistakes, self.confident

    def merge(self, states: Sequence[TopKState]) -> dict[str, float]:
        """Return the figures over all processes."""
        images, top1, top5, loss = reduce(torch.add, (state[0] for state in states)).tolist()
        confusion = reduce(torch.add, (state[1] for state in states))
        self.total_confusion = confusion.view(self.classes, self.classes)
        self.worst = sorted((m for s in states for m in s[2]), reverse=True)[: self.MISTAKES]
        mistakes, hits = ([g for s in states for g in s[3][i]] for i in (0, 1))
        self.confident = (
            by_confidence(mistakes, self.MISTAKES),
            by_confidence(hits, self.MISTAKES),
        )
        return {
            "top1": 100 * top1 / images,
            "top5": 100 * top5 / images,
            "loss": loss / images,
            "images": images,
        }

    def per_class(self) -> list[Json]:
        """Return a row for each class: images, accuracy (recall) and precision in per cent, None if undefined."""
        matrix = self.total_confusion.double()
        right, labelled, guessed = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        accuracy, precision = (100 * right / labelled).tolist(), (100 * right / guessed).tolist()
        return [
            {
                "class": name,
                "images": int(labelled[i]),
                "accuracy": accuracy[i] if labelled[i] else None,
                "precision": precision[i] if guessed[i] else None,
            }
            for i, name in enumerate(self.names)
        ]

    def details(self) -> Json:
        """Return class names, confusion [label][guess], the table of classes, mistakes and hits.

        Mistakes and hits are (score, sample, label, guess): "mistakes" with the loss, greatest first; the others with
        the probability of the guess, most confident first.
        """
        return {
            "classes": list(self.names),
            "confusion": self.total_confusion.tolist(),
            "per_class": self.per_class(),
            "mistakes": self.worst,
            "confident_mistakes": self.confident[0],
            "confident_hits": self.confident[1],
        }


def _rows(
    chosen: Tensor, score: Tensor, samples: Tensor, labels: Tensor, guesses: Tensor
) -> list[Guess]:
    return list(
        zip(
            score[chosen].tolist(),
            samples[chosen.cpu()].tolist(),
            labels[chosen].tolist(),
            guesses[chosen].tolist(),
            strict=True,
        )
    )


def by_confidence(found: Sequence[Guess], count: int) -> list[Guess]:
    """Return the predictions with the highest probability; of equal ones the first sample."""
    return sorted(found, key=lambda guess: (-guess[0], guess[1]))[:count]


def average_precision(scores: NDArray[np.float32], truth: NDArray[np.bool_]) -> float:
    """Return the average precision of one class: sum of (R_n - R_(n-1)) P_n over all thresholds, as in scikit-learn.

    Args:
        scores: scores of the images, (n,).
        truth: whether they have the class, (n,), at least one of them.
    """
    order = np.argsort(-scores, kind="stable")
    scores, hits = scores[order], np.cumsum(truth[order])
    last = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # of equal scores
    precision, recall = hits[last] / (last + 1), hits[last] / hits[-1]
    return float(np.sum(np.diff(recall, prepend=0) * precision))


class SourceMetric:
    """Top-1 and top-5 accuracy, or mean average precision, of each source over its own classes, and their mean.

    Args:
        source: the validation images.
        known: its classes and losses.
    """

    def __init__(self, source: Mixture, known: SourceClasses) -> None:
        self.source, self.known = source, known
        self.members = source.member_table()
        # By source: images, loss, top-1, top-5; and the scores and labels of tags.
        self.sums: Tensor | None = None
        self.tags: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.rows: list[Json] = []

    @torch.no_grad()
    def update(self, model: nn.Module, batch: Batch) -> None:
        """Add one batch."""
        logits, targets = model(batch["images"]).float(), batch["targets"]
        self.known = self.known.to(logits.device)
        loss = mixture_loss(logits, targets, batch["sources"], self.known)
        members = self.members[
            batch["keys"][:, 1].numpy()
        ]  # known without synchronising with the device
        sums = torch.zeros(len(self.source.members), 4, device=logits.device, dtype=torch.float64)
        for number in np.unique(members).tolist():
            at = torch.from_numpy(np.flatnonzero(members == number)).to(logits.device)
            classes = torch.from_numpy(self.source.numbers[number]).to(logits.device)
            own, truth = logits[at][:, classes], targets[at][:, classes]
            sums[number, :2] = torch.stack([torch.ones_like(loss[at]).sum(), loss[at].sum()])
            if self.source.members[number].multi:
                pair = own.sigmoid().cpu(), truth.bool().cpu()
                self.tags.setdefault(number, []).append(pair)
            else:
                hits = own.topk(min(5, len(classes))).indices == truth.argmax(1)[:, None]
                sums[number, 2:] = torch.stack(
                    [hits[:, 0].float().sum(), hits.any(1).float().sum()]
                )
        self.sums = sums if self.sums is None else self.sums + sums

    def state(self) -> SourceState:
        """Return the sums, and scores and labels of tags."""
        sums = torch.zeros(len(self.source.members), 4).double()
        return sums if self.sums is None else self.sums.cpu(), self.tags

    def merge(self, states: Sequence[SourceState]) -> dict[str, float]:
        """Return "score", the mean over the sources of top-1 or mAP; loss, images; and NAME.top1, top5 or map."""
        sums = reduce(torch.add, (sums for sums, _ in states))
        tags: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for _, found in states:
            for number, pairs in found.items():
                tags.setdefault(number, []).extend(pairs)
        named: dict[str, float] = {}
        scores, self.rows = [], []
        for number, member in enumerate(self.source.members):
            images, loss, top1, top5 = sums[number].tolist()
            if not images:  # `pale eval` may evaluate a sample of the images
                continue
            figures = {"top1": 100 * top1 / images, "top5": 100 * top5 / images}
            if member.multi:
                figures = {"map": mean_average_precision(tags[number])}
            scores.append(next(iter(figures.values())))
            named |= {f"{member.name}.{name}": value for name, value in figures.items()}
            self.rows.append(
                {"class": member.name, "images": images, "loss": loss / images, "score": scores[-1]}
                | {name: figures.get(name) for name in ("top1", "top5", "map")}
            )
        images, loss = sums[:, :2].sum(0).tolist()
        mean = sum(scores) / len(scores)
        return {"score": mean, "loss": loss / images, "images": images} | named

    def details(self) -> Json:
        """Return a row for each source."""
        return {"classes": [], "per_class": self.rows}


def mean_average_precision(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the mean over all classes that occur, in per cent, from scores and labels of parts, (n, classes) each."""
    scores, truth = (torch.cat(part).numpy() for part in zip(*pairs, strict=True))
    present = np.flatnonzero(truth.any(0))
    found = [average_precision(scores[:, c], truth[:, c]) for c in present]
    return 100 * float(np.mean(found)) if found else 0.0
