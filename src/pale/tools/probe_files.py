"""Score files of embeddings, for `pale probe`."""

from __future__ import annotations

from pathlib import Path

from ..core.plain_json import Json
from ..errors import SettingsError
from .features import Features, fit_probe, save_probe
from .neighbours import score_neighbours


def probe_files(
    train: Path,
    val: Path,
    output: Path | None,
    weights: Path | None,
    recipe: str | None,
    neighbours: int | None,
) -> tuple[Json, list[str]]:
    """Fit and score a linear classifier on files of features; return the scores as plain values and as lines.

    With `output` and `weights` the model with the classifier is written, with `neighbours` so many nearest neighbours
    are scored too.
    """
    if (output is None) != (weights is None):
        raise SettingsError(
            "-o FILE and --weights RUN must be given together; give both or neither"
        )
    features, held = Features.load(train), Features.load(val)
    plain: Json = {}
    lines = []
    if neighbours is not None:  # first, as wrong settings raise here
        nearest = score_neighbours(features, held, neighbours)
        plain["neighbours"] = vars(nearest)
        lines.append(f"top-1 {nearest.val:.2f} % by {nearest.k} nearest neighbours")
    found, layer = fit_probe(features, held)
    lines.insert(
        0, f"top-1 {found.val:.2f} % (fitted on {found.train:.2f} %), penalty {found.strength:g}"
    )
    if output is not None and weights is not None:
        save_probe(layer, features.classes, weights, recipe, output)
        lines.append(f"{output} written")
    return vars(found) | plain, lines
