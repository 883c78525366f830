"""Choose validation samples of a dataset without splits: `hold_out`.

By file name ("name"), the choice does not depend on the order of the files or the location of the dataset, and an added
image moves at most one other image between the two sets. By position ("order"), it is drawn from the sorted samples.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ...errors import DataError

HoldOutBy = Literal["order", "name"]


def hold_out(
    count: int,
    name: Callable[[int], str],
    share: float,
    seed: int,
    by: HoldOutBy = "order",
    groups: Sequence[int] | None = None,
    classes: Sequence[str] = (),
) -> tuple[list[int], list[int]]:
    """Split off `share` of each group; return the indices of the rest and of the split-off samples, sorted.

    Args:
        count: number of samples.
        name: returns the name of a sample; only the last part of a path counts.
        share: share of each group; by name, at least one sample of each group is in both sets.
        seed: seed of the choice.
        by: "order" draws positions, "name" chooses by file name.
        groups: group of each sample, such as its class; None: one group.
        classes: names of the groups, for messages.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index in range(count):
        members[0 if groups is None else groups[index]].append(index)
    rng = np.random.default_rng(seed)
    kept: list[int] = []
    held: list[int] = []
    for group, found in sorted(members.items()):
        if by == "name":
            order = _order_by_name(found, name, seed)
            size = min(max(round(share * len(found)), 1), len(found) - 1)
        else:
            order, size = rng.permutation(found).tolist(), round(share * len(found))
            if not 0 < size < len(found):
                of_class = f" of class {classes[group]!r}" if classes else ""
                raise DataError(
                    f"a hold-out share of {share} of {len(found)} images{of_class} leaves one side empty; choose "
                    "another share"
                )
        held += order[:size]
        kept += order[size:]
    return sorted(kept), sorted(held)


def _order_by_name(found: Sequence[int], name: Callable[[int], str], seed: int) -> list[int]:
    if len(found) < 2:
        raise DataError(
            f"a class needs at least 2 images, one to train and one to validate, but {name(found[0])} is the only "
            "one of its class; add images or remove the class"
        )
    return sorted(found, key=lambda index: (_rank(name(index), seed), index))


def held_out_note(kept: int, held: int, seed: int) -> str:
    """Return the line of the log about images that were held out by name."""
    return (
        f"no split given: {held} of {kept + held} images are held out for validation, "
        f"chosen by file name and seed {seed}"
    )


def _rank(name: str, seed: int) -> bytes:
    content = f"{seed}/{os.path.basename(name)}".encode("utf-8", "backslashreplace")
    return hashlib.sha256(content).digest()
