"""One page that shows the package at work: a photo predicted and looked into, and a short training."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image

from . import zoo
from .loading import KINDS, Kind
from .pale_transformer import VARIANTS
from .predict import Prediction, Predictor
from .train import log
from .train.report import curve
from .view import pales
from .view_attention import look
from .view_sheet import save, sheet

PAGES = Path(__file__).parent / "pages"
PHOTO = PAGES / "cat.jpg"
TITLES: dict[Kind, str] = {
    "classification": "What is it?",
    "segmentation": "Which pixels?",
    "detection": "Where, and what shape?",
}
STYLE = (PAGES / "demo.css").read_text()


@dataclass(frozen=True)
class Shown:
    """A prediction of weights that come with the package."""

    entry: zoo.Entry
    said: Prediction


def predictions(photo: Path) -> list[Shown]:
    """Of every task that there are weights for."""
    found = []
    for task in KINDS:
        name = zoo.default(task)
        if name is not None:
            found.append(Shown(zoo.get(name), Predictor(name, task, device="cpu")(photo)))
    return found


def write(
    output: Path,
    photo: Path = PHOTO,
    run: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Path:
    """Write report.html into a folder, with what it links to beside it, and give its path.

    Args:
        output: the folder.
        photo: to look at.
        run: a run to show below; it should lie in the folder, for the link to its report.
        say: is told what is done.
    """
    output.mkdir(parents=True, exist_ok=True)
    say("predicting")
    shown = predictions(photo)
    say("looking")
    source = zoo.default("classification") or "pale_nano"
    seen = look(photo, source)
    save(seen, output / "attention.html", title=photo.name)
    parts = [
        _head(photo),
        _predicted(shown),
        _looked(sheet(seen), seen.loaded.trained, seen.loaded.name),
        _pales(),
        _trained(output, run) if run is not None else "",
    ]
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Pale Transformer</title><style>{STYLE}</style><main>{''.join(parts)}</main></html>\n"
    )
    path = output / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _head(photo: Path) -> str:
    credit = ""
    if photo == PHOTO:
        credit = "Photo: Chelsea, by Stéfan van der Walt, CC0, from scikit-image."
    return (
        "<h1>Pale Transformer</h1><p>A vision backbone whose attention works on interlaced rows and columns. This page "
        f"was made on this computer, and nothing was downloaded. {credit}</p>"
    )


def _predicted(shown: Sequence[Shown]) -> str:
    if not shown:
        return (
            "<h2>One photo, three tasks</h2><p>No weights come with this installation. Train some: "
            "<code>pale train quickstart</code>, then <code>pale predict PHOTO --weights RUN</code>.</p>"
        )
    cards = []
    for each in shown:
        entry, task = each.entry, each.said
        told = f"{entry.model}, {entry.params / 1e6:.1f} M parameters, {entry.bytes / 1e6:.1f} MB"
        cards.append(
            f"<figure>{_picture(task.draw(), 760)}<figcaption><b>{TITLES[entry.task]}</b> {escape(task.words())}<br>"  # type: ignore[index]
            f"<small>{escape(entry.name)}: {escape(told)}; {escape(entry.headline)} on {escape(entry.data)}</small>"
            "</figcaption></figure>"
        )
    return (
        f"<h2>One photo, three tasks</h2><div class=cards>{''.join(cards)}</div>"
        "<p>The same on your own: <code>pale predict PHOTO --task segmentation -o out</code>, or in a browser: "
        "<code>pale serve</code>.</p>"
    )


def _looked(picture: Image.Image, trained: bool, name: str) -> str:
    whose = f"{escape(name)}, as it was trained" if trained else f"{escape(name)}, untrained"
    return (
        f"<h2>What one token looks at</h2><p>The tokens that it attends to in each stage, with the true weights of "
        f"{whose}. <a href=attention.html>Move over the photo yourself</a>: the page needs no server.</p>"
        f"<figure class=wide>{_picture(picture, 1500)}</figure>"
    )


def _pales() -> str:
    picture = pales(VARIANTS["pale_tiny"], (224, 224))
    return (
        "<h2>What a pale is</h2><p>Every token attends inside a pale: some rows and some columns, spread over the "
        "whole map. Beside it the ways of others.</p>"
        f"<figure class=wide>{_picture(picture, 1500)}</figure>"
    )


def _trained(output: Path, run: Path) -> str:
    events = log.read(run / "log.jsonl")
    steps = [e for e in events if e["event"] == "step"]
    scores = [e for e in events if e["event"] == "eval" and "top1" in e]
    if not steps:
        return ""
    figures = [curve("training loss", [(e["step"], e["loss"]) for e in steps])]
    told = f"{steps[-1]['step']} steps"
    if scores:
        figures.append(curve("validation top-1, %", [(e["step"], e["top1"]) for e in scores]))
        told += f", {scores[-1]['top1']:.1f} % of new pictures right"
    link = ""
    if (run / "report.html").is_file() and run.is_relative_to(output):
        link = (
            f" <a href='{escape(run.relative_to(output).as_posix())}/report.html'>Its report</a>."
        )
    return (
        f"<h2>A model trained here</h2><p>pale_nano on generated pictures, from scratch: {told}.{link}</p>"
        f"<div class=curves>{''.join(figures)}</div>"
    )


def _picture(picture: Image.Image, most: int) -> str:
    picture = picture.convert("RGB")
    picture.thumbnail((most, 4 * most))
    content = io.BytesIO()
    picture.save(content, "JPEG", quality=90)
    code = base64.b64encode(content.getvalue()).decode()
    size = f"width={picture.width} height={picture.height}"
    return f"<img src='data:image/jpeg;base64,{code}' {size} alt=''>"
