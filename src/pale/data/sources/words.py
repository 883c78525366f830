"""Lists of words: names for classes that are WordNet ids, such as n01443537."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...errors import DataError
from ..reading import display_name, read_bytes

# File names in Tiny ImageNet, in its subsets, and in Kaggle's copy of ImageNet.
WORD_LISTS = ("words.txt", "classes.txt", "LOC_synset_mapping.txt")
# Other lines are ignored, so that a recipe cannot copy the content of another file into a report.
LINE = re.compile(r"(n\d{8})[ \t]+(\S.*)", re.ASCII)
MAX_NAME = 100  # characters
MAX_BYTES = 2**25  # the whole of WordNet has 3 MB


def read_words(path: Path) -> dict[str, str]:
    """Return the name of each id; a line has the id and names separated by commas, of which the first is used."""
    try:
        content = read_bytes(path, MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(
            f"the list of words {display_name(path)} cannot be read ({error.strerror or error}); give data.words a "
            "file with lines such as 'n01443537 goldfish', or null"
        ) from None
    found = (LINE.fullmatch(line.strip()) for line in content.splitlines())
    return {match[1]: match[2].partition(",")[0].strip()[:MAX_NAME] for match in found if match}


def name_classes(classes: Sequence[str], words: Mapping[str, str]) -> list[str]:
    """Return the name of each class that is a listed id; equal names (crane) are followed by the id."""
    names = [words.get(name, name) for name in classes]
    count = Counter(names)
    return [
        f"{name} ({key})" if count[name] > 1 and name != key else name
        for key, name in zip(classes, names, strict=True)
    ]
