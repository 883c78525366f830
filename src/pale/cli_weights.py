"""The command `pale weights`: weights that come with the package, and the way of others to be like them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from .cli_say import console, say, say_json

Run = Callable[[argparse.Namespace], int | None]
SOURCE = "a name that pale weights lists, a run's folder, or a .safetensors file"


def add_weights(commands: Any, add: Callable[[Any, str, Run, str], Any]) -> None:
    """Add `pale weights` and what belongs to it; `add(commands, name, run, help)` makes a parser."""
    weights = add(
        commands,
        "weights",
        _list,
        "list the weights that come with the package; verify, export or pack weights",
    )
    _folder(weights)
    weights.epilog = (
        "A name goes wherever weights go: pale eval NAME, pale predict PHOTO --weights NAME, pale export NAME -o "
        "model.onnx, pale train RECIPE --init NAME."
    )
    kinds = weights.add_subparsers(metavar="WHAT", parser_class=type(weights))
    _folder(add(kinds, "list", _list, "list them: the same as pale weights alone"))
    show = add(kinds, "show", _show, "print the card of one: data, recipe, figures, peers, limits")
    show.add_argument("name", metavar="NAME", help="as pale weights lists it")
    _folder(show)
    verify = add(kinds, "verify", _verify, "check every file against its SHA-256")
    _folder(verify)
    export = add(
        kinds,
        "export",
        _export,
        "write weights as a folder that timm and the Hugging Face hub read",
    )
    export.add_argument("source", type=Path, metavar="NAME", help=SOURCE)
    export.add_argument("target", type=Path, metavar="DIR", help="the folder to write")
    export.add_argument("--recipe", help="for foreign weights: the recipe that says the model")
    _folder(export)
    export.epilog = (
        "A classifier is then, after import pale, timm.create_model('local-dir:DIR', pretrained=True). Segmenters and "
        "detectors, which timm has not, are read from the folder by pale eval, predict and export."
    )
    pack = add(kinds, "pack", _pack, "write the weights of a run in a quarter of the space")
    pack.add_argument(
        "source", type=Path, metavar="RUN", help="a run's folder, or a .safetensors file"
    )
    pack.add_argument("-o", "--output", type=Path, required=True, help="small.safetensors")
    pack.add_argument("--recipe", help="for foreign weights: the recipe that says the model")
    pack.epilog = (
        "Matrices become int8 with a scale for each output channel. The file goes wherever weights go; pale eval "
        "says what it is worth."
    )


def _folder(parser: Any) -> None:
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="another folder of weights, with its index.json"
    )


def _where(args: argparse.Namespace) -> Path:
    from .zoo import FOLDER, INDEX

    if args.folder is None:
        return FOLDER
    if not (args.folder / INDEX).is_file():
        raise ValueError(
            f"{args.folder} holds no {INDEX}; benchmarks/demo_weights.py writes such folders"
        )
    return Path(args.folder)


def _list(args: argparse.Namespace) -> None:
    from .zoo import entries

    folder = _where(args)
    found = entries(folder)
    if args.json:
        say_json([asdict(entry) for entry in found])
        return
    if not found:
        say(
            f"{folder} holds no weights yet: make them with benchmarks/demo_weights.py (docs/weights.md)"
        )
        return
    table = Table("name", "task", "model", "classes")
    for column in ("M params", "MB", "figure, %", "photos"):
        table.add_column(column, justify="right")
    for entry in found:
        table.add_row(
            entry.name,
            entry.task,
            entry.model,
            str(entry.classes),
            f"{entry.params / 1e6:.2f}",
            f"{entry.bytes / 1e6:.2f}",
            entry.headline,
            f"{entry.figures.get('images', 0):.0f}",
        )
    console().print(table)
    total = sum(entry.bytes for entry in found) / 1e6
    say(
        f"{total:.2f} MB in {folder}; pale weights show NAME prints a card: data, recipe, peers, limits"
    )


def _show(args: argparse.Namespace) -> None:
    from .zoo import get

    folder = _where(args)
    entry = get(args.name, folder)
    if not (folder / entry.card).is_file():
        raise ValueError(f"{folder / entry.card} is missing; install the package again")
    card = (folder / entry.card).read_text()
    if args.json:
        say_json(asdict(entry) | {"text": card})
        return
    # What stands between two lines of --- is for the hub.
    parts = card.split("---\n", 2)
    say(parts[2].strip() if card.startswith("---\n") and len(parts) == 3 else card.strip())


def _verify(args: argparse.Namespace) -> int:
    from .zoo import verify

    folder = _where(args)
    found = verify(folder)
    bad = [each for each in found if each.problem is not None]
    if args.json:
        say_json([asdict(each) for each in found])
        return 1 if bad else 0
    if not found:
        say(f"{folder} holds no weights yet: there is nothing to check")
    for each in found:
        say(f"{each.name}: {each.file} " + (each.problem or "is as it was made"))
    if bad:
        names = ", ".join(each.name for each in bad)
        sys.stderr.write(f"pale: not as they were made: {names}; install the package again\n")
    return 1 if bad else 0


def _export(args: argparse.Namespace) -> None:
    from .zoo.folder import export

    written = export(args.source, args.target, args.recipe, _where(args))
    if args.json:
        say_json({"files": [str(path) for path in written]})
        return
    say(f"{args.target} written: {', '.join(path.name for path in written)}")
    if any(path.name == "config.json" for path in written):
        say(f"import pale; timm.create_model('local-dir:{args.target}', pretrained=True)")


def _pack(args: argparse.Namespace) -> None:
    from .zoo import digest
    from .zoo.folder import pack

    size = pack(args.source, args.output, args.recipe)
    found = {"file": str(args.output), "bytes": size, "sha256": digest(args.output)}
    if args.json:
        say_json(found)
        return
    say(f"{args.output} written: {size / 1e6:.2f} MB, sha256 {found['sha256']}")
