"""Images of a report: mistakes and hits with thumbnails, and the best and worst images as the task draws them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path

from PIL import Image

from ...core.data_urls import jpeg_data_url
from ...core.numbers import finite_number
from ...core.plain_json import Json
from ...recipes.schema import Recipe
from ...tasks.base import Task
from .details import Details, Guess
from .record import MISSING_DATA
from .tables import text

THUMBNAIL = 160  # pixels
PANEL = 1000  # pixels of several images side by side


class Images:
    """The validation images of a run, if its data is available.

    Args:
        recipe: recipe of the run.
        details: details of its last evaluation.
        names: names of the classes, as they are shown.
        task: task of the run, if there is one already; None: build it when an image is needed.
    """

    def __init__(
        self, recipe: Recipe, details: Details, names: Sequence[str], task: Task | None = None
    ) -> None:
        self.recipe, self.details, self.names = recipe, details, names
        if task is not None:
            self.task = task

    @cached_property
    def task(self) -> Task:
        """The task, which finds the data."""
        return self.recipe.task(self.details.classes)

    def guesses(self) -> str:
        """Return the most confident mistakes and hits; for a run of version 0.1, the mistakes with the highest loss."""
        found, parts = self.details, []
        if found.confident_mistakes:
            parts.append(
                (
                    "Most confident mistakes",
                    found.confident_mistakes,
                    "predicted {guess}, {score:.1%}",
                )
            )
        elif found.mistakes:
            parts.append(("Worst mistakes", found.mistakes, "predicted {guess} (loss {score:.1f})"))
        if found.confident_hits:
            parts.append(("Most confident hits", found.confident_hits, "{score:.1%}"))
        return "".join(
            f"<h2>{title}</h2>{self._shown(partial(self._cards, entries, style))}"
            for title, entries, style in parts
        )

    def _cards(self, entries: Sequence[Guess], style: str) -> str:
        figures = []
        for score, index, label, guess in entries:
            below = style.format(guess=self.names[guess], score=score)
            caption = f"<b>{text(self.names[label], 80)}</b><br>{text(below, 120)}"
            image = self.task.val_image(index)
            name = Path(self.task.val_name(index)).name
            figures.append(
                f"<figure title='{text(name)}'><img alt='{text(f'{self.names[label]}: {below}')}' "
                f"src='{embedded(image, THUMBNAIL)}'><figcaption>{caption}</figcaption></figure>"
            )
        return f"<div class=cards>{''.join(figures)}</div>"

    def gallery(self) -> str:
        """Return the worst and the best images, drawn by the task; an evaluation lists the best first."""
        entries = self.details.gallery
        if not entries:
            return ""
        half = (len(entries) + 1) // 2
        parts = [("Worst images", entries[half:][::-1]), ("Best images", entries[:half])]
        about = f"<p>{text(self.recipe.task_class.panel_about)}</p>"
        return "".join(
            f"<h2>{title}</h2>{about}{self._shown(partial(self._panels, part))}"
            for title, part in parts
            if part
        )

    def _panels(self, entries: Sequence[Json]) -> str:
        figures = []
        for entry in entries:
            scores = [
                f"{self.recipe.task_class.figure_title(name).removesuffix(', %')} {value:.1f} %"
                for name, value in entry.items()
                if isinstance(value, float) and finite_number(value) is not None
            ]
            name = Path(self.task.val_name(entry["index"])).name
            caption = f"<b>{text(name, 120)}</b> {text(', '.join(scores))}"
            figures.append(
                f"<figure><img alt='{text(name)}' src='{embedded(self.task.panel(entry), PANEL)}'>"
                f"<figcaption>{caption}</figcaption></figure>"
            )
        return f"<div class=panels>{''.join(figures)}</div>"

    def _shown(self, body: Callable[[], str]) -> str:
        try:
            return body()
        except MISSING_DATA as error:
            return f"<p>The images cannot be shown: {text(error, 1000)}.</p>"


def embedded(image: Image.Image, side: int) -> str:
    """Return an image as a data URL, with at most `side` pixels per side."""
    return jpeg_data_url(image, (side, side), quality=85)
