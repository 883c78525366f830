"""The page of `pale demo`: predictions and attention on one photo, their limits, and a short training run.

What the packaged photo shows is known, so the page opens with the predictions that are right, and wrong ones are its
example of the limits. Every prediction uses the preprocessing of `pale predict`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from ..core.data_urls import jpeg_data_url
from ..core.escaping import escape_html
from ..core.escaping import html_page as whole_page
from ..data import rle
from ..errors import DataError
from ..model.pale_transformer import VARIANTS
from ..predict import Prediction, Predictor
from ..recipes import get
from ..tasks import DEFAULT_TASK, TASKS
from ..train import log
from ..train.distributed import join
from ..train.loop import Outcome, train
from ..train.report import charts
from ..train.report.charts import Chart, Series, draw
from ..train.report.record import points
from ..weights import zoo
from .attention import trace_attention
from .figures import draw_pales
from .page import save
from .sheet import PAGES, sheet

PHOTO = PAGES / "cat.jpg"
# A cat without a breed, face in the centre: labels of it, in lower case. No name of a breed is right.
TRUTH = frozenset({"cat", "pet", "tabby", "tabby cat", "domestic cat", "house cat"})
STYLE = (PAGES / "demo.css").read_text() + charts.STYLE


@dataclass(frozen=True)
class DemoPrediction:
    """A prediction with included weights."""

    entry: zoo.ZooEntry
    prediction: Prediction

    @property
    def order(self) -> bool:
        """Sort key: objects with a score first, then regions."""
        return all(region.score is None for region in self.prediction.regions())

    @property
    def is_right(self) -> bool:
        """Whether a prediction for the packaged photo is right: its objects, or its class at the centre."""
        width, height = self.prediction.image.size
        labels = [
            region.label
            for region in self.prediction.regions()
            if region.score is not None
            or rle.draw(region.shape, (height, width))[height // 2, width // 2]
        ]
        return bool(labels) and all(TRUTH & set(x.casefold().split(", ")) for x in labels)


def require_photo(path: Path) -> Path:
    """Return the path of the photo; raise an error if it does not exist, before minutes of training."""
    if not path.is_file():
        raise DataError(f"there is no photo {path}; give another with --photo FILE")
    return path


def train_quickstart(run: Path, quiet: bool = False) -> Outcome:
    """Train the quickstart recipe in a folder, replacing an earlier run there."""
    if (run / "recipe.yaml").is_file():
        shutil.rmtree(run)
    with join(None) as world:
        return train(get("quickstart"), run, world, quiet=quiet)


def predictions(photo: Path) -> list[DemoPrediction]:
    """Return a prediction for every task with included weights."""
    found = []
    for task in TASKS:
        name = zoo.default_name(task)
        if name is not None:
            found.append(
                DemoPrediction(zoo.get_entry(name), Predictor(name, task, device="cpu")(photo))
            )
    return found


def write(
    output: Path,
    photo: Path = PHOTO,
    run: Path | None = None,
    report: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write report.html and the files that it links to into a folder, and return its path.

    Args:
        output: the folder.
        photo: the image to use.
        run: a run to show; if it is inside the folder, its report is linked.
        report: called with the name of each step.
    """
    output.mkdir(parents=True, exist_ok=True)
    report("predicting")
    shown = predictions(photo)
    known = shown if photo == PHOTO else predictions(PHOTO)  # of a photo whose content is known
    if photo == PHOTO:
        shown = sorted((each for each in shown if each.is_right), key=lambda each: each.order)
    report("tracing attention")
    source = shown[0].entry.name if shown else zoo.default_name(DEFAULT_TASK) or "pale_nano"
    trace = trace_attention(photo, source)
    save(trace, output / "attention.html", title=photo.name)
    parts = [
        _header(photo),
        _predictions(shown),
        _limits([each for each in known if not each.is_right], photo),
        _attention(sheet(trace), trace.bundle.trained, source),
        _pales(),
        _training(output, run) if run is not None else "",
    ]
    path = output / "report.html"
    page = whole_page("Pale Transformer", STYLE, f"<main>{''.join(parts)}</main>")
    path.write_text(page, encoding="utf-8")
    return path


def _header(photo: Path) -> str:
    credit = ""
    if photo == PHOTO:
        credit = "Photo: Chelsea, by Stéfan van der Walt, CC0, from scikit-image; no model was trained on it."
    return (
        "<h1>Pale Transformer</h1><p>A vision backbone with attention in interlaced rows and columns. This page was "
        f"made on this computer without downloads. {credit}</p>"
    )


def _predictions(shown: Sequence[DemoPrediction]) -> str:
    if not zoo.list_entries():
        return (
            "<h2>Predictions</h2><p>This installation contains no weights. Train a model: "
            "<code>pale train quickstart</code>, then <code>pale predict PHOTO --weights RUN</code>.</p>"
        )
    return (
        f"<h2>Predictions for one photo</h2><div class=cards>{''.join(map(_card, shown))}</div>"
        "<p>For your own photos: <code>pale predict PHOTO --task segmentation -o out</code>, or in a browser: "
        "<code>pale serve</code>. To train on them: <code>pale train finetune --data.root photos</code>.</p>"
    )


def _card(shown: DemoPrediction) -> str:
    entry, prediction = shown.entry, shown.prediction
    facts = f"{entry.model}, {entry.params / 1e6:.1f} M parameters, {entry.bytes / 1e6:.1f} MB"
    return (
        f"<figure>{_figure(prediction.draw(), 760)}<figcaption>"
        f"<b>{TASKS[entry.task].pipeline.question}</b> {escape_html(prediction.words())}<br>"
        f"<small>{escape_html(entry.name)}: {escape_html(facts)}; "
        f"{escape_html(entry.headline)} on {escape_html(entry.data)}</small>"
        "</figcaption></figure>"
    )


def _limits(wrong: Sequence[DemoPrediction], photo: Path) -> str:
    """Return the failures for the packaged photo, and what to expect of the packaged models."""
    entries = zoo.list_entries()
    if not entries:
        return ""
    sources = " and ".join(dict.fromkeys(entry.data for entry in entries))
    lines = [
        f"The included models are small and know only their training data ({escape_html(sources)}). They have no "
        "answer for anything else: a photo of something else gets one of their classes too. Outlines are coarse, and "
        "close-ups lose parts."
    ]
    lines += [
        f"{escape_html(e.name)}: {escape_html(e.headline)} on {e.figures.get('images', 0):,.0f} test images."
        for e in entries
    ]
    failure = ""
    if wrong:
        where = "the photo above" if photo == PHOTO else "the example photo"
        failure = (
            f"<p>A failure: {where} shows a cat without a breed, so every name of a breed is wrong. "
            f"{'This model' if len(wrong) == 1 else 'These models'} can only answer with a class from the training; "
            "low probabilities are the one sign that none fits.</p>"
            f"<div class=cards>{''.join(map(_card, wrong))}<div></div></div>"
        )
    return f"<h2>Limits</h2><ul>{''.join(f'<li>{x}' for x in lines)}</ul>{failure}"


def _attention(image: Image.Image, trained: bool, name: str) -> str:
    weights = "trained weights" if trained else "untrained weights"
    return (
        "<h2>Attention of one token</h2><p>The tokens that one token attends to in each stage, and its attention "
        f"weights ({escape_html(name)}, {weights}). <a href=attention.html>Interactive page</a>: move over the photo "
        "to choose a token; it needs no server.</p>"
        f"<figure class=wide>{_figure(image, 1500)}</figure>"
    )


def _pales() -> str:
    image = draw_pales(VARIANTS["pale_tiny"], (224, 224))
    return (
        "<h2>What a pale is</h2><p>Every token attends to the tokens of a pale: some rows and some columns, spread "
        "over the whole map. The other panels show other kinds of attention.</p>"
        f"<figure class=wide>{_figure(image, 1500)}</figure>"
    )


def _training(output: Path, run: Path) -> str:
    events = log.read(run / "log.jsonl")
    losses, scores = points(events, "step", "loss"), points(events, "eval", "top1")
    if not losses:
        return ""
    figures = [draw(Chart("training loss", "loss", [Series("loss", losses)]))]
    summary = f"{losses[-1][0]:.0f} steps"
    if scores:
        series = Series("top-1", scores, marked=True)
        figures.append(draw(Chart("validation top-1", "%", [series])))
        summary += f", {scores[-1][1]:.1f} % accuracy on new images"
    link = ""
    if (run / "report.html").is_file() and run.is_relative_to(output):
        # A folder may be called "javascript:..."; a quoted name is never a scheme.
        target = quote(run.relative_to(output).as_posix())
        link = f" <a href='{escape_html(target)}/report.html'>Its report</a>."
    return (
        f"<h2>A model trained here</h2><p>pale_nano on generated images, from scratch: {summary}.{link}</p>"
        f"<div class=charts>{''.join(figures)}</div>"
    )


def _figure(image: Image.Image, max_width: int) -> str:
    image = image.convert("RGB")
    image.thumbnail((max_width, 4 * max_width))
    url = jpeg_data_url(image, image.size, quality=90)
    return f"<img src='{url}' width={image.width} height={image.height} alt=''>"
