"""Choose validation samples of a dataset without splits, by seed and file name.

The choice does not depend on the order of the files or the location of the dataset. An added image moves at most one
other image between the two sets.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from ...errors import DataError

HoldOutBy = Literal["order", "name"]


def split_by_name(
    names: Sequence[str], share: float, seed: int, groups: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return the indices of the training samples and of the held-out ones, sorted.

    Args:
        names: names of the files; only the last part of a path counts.
        share: share of each group to hold out; at least one sample of each group is in both sets.
        seed: seed of the choice.
        groups: group of each sample, such as its class; None: one group.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index in range(len(names)):
        members[0 if groups is None else groups[index]].append(index)
    kept: list[int] = []
    held: list[int] = []
    for found in members.values():
        if len(found) < 2:
            raise DataError(
                f"a class needs at least 2 images, one to train and one to validate, but {names[found[0]]} is the only "
                "one of its class; add images or remove the class"
            )
        order = sorted(found, key=lambda index: (_rank(names[index], seed), index))
        count = min(max(round(share * len(found)), 1), len(found) - 1)
        held += order[:count]
        kept += order[count:]
    return sorted(kept), sorted(held)


def held_out_note(kept: int, held: int, seed: int) -> str:
    """Return the line of the log about images that were held out by name."""
    return (
        f"no split given: {held} of {kept + held} images are held out for validation, "
        f"chosen by file name and seed {seed}"
    )


def _rank(name: str, seed: int) -> bytes:
    content = f"{seed}/{os.path.basename(name)}".encode("utf-8", "backslashreplace")
    return hashlib.sha256(content).digest()
