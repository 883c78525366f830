"""Read the cards of the weights: data, recipe, figures, peers and limits, as Markdown."""

from __future__ import annotations

from pathlib import Path

from ...errors import WeightsError
from .index import ZooEntry


def read_card(entry: ZooEntry, folder: Path) -> str:
    """Return the card of an entry."""
    path = folder / entry.card
    if not path.is_file():
        raise WeightsError(f"{path} is missing; install the package again")
    return path.read_text()


def without_metadata(card: str) -> str:
    """Return a card without the part between two lines of ---, which is metadata for the Hugging Face hub."""
    parts = card.split("---\n", 2)
    return parts[2] if card.startswith("---\n") and len(parts) == 3 else card
