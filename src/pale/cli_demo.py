"""`pale demo`: everything in one page, on this computer."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from .cli_parser import add_command


def add_demo(commands: Any) -> None:
    """Add `pale demo`."""
    demo = add_command(
        commands,
        "demo",
        _demo,
        "show everything on one page: a photo predicted, looked into; a short training",
    )
    demo.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("runs/demo"),
        metavar="DIR",
        help="folder of the page",
    )
    demo.add_argument("--photo", type=Path, help="another photo (default: a cat)")
    demo.add_argument("--no-training", action="store_true", help="leave out the training")
    demo.epilog = (
        "The training takes about two minutes on two cores; --no-training leaves half a minute."
    )


def _demo(args: argparse.Namespace) -> int:
    from .demo import PHOTO, write

    photo = args.photo or PHOTO
    if not photo.is_file():
        raise ValueError(f"there is no photo {photo}")
    run = None
    if not args.no_training:
        run = args.output / "quickstart"
        if code := _train(run, args.json):
            return code
    with Console(stderr=True).status("starting") as status:
        path = write(args.output, photo, run, status.update)
    if args.json:
        sys.stdout.write(json.dumps({"page": str(path)}) + "\n")
    else:
        sys.stdout.write(f"{path} written: open it in a browser\n")
    return 0


def _train(run: Path, quiet: bool) -> int:
    """The quickstart, anew; an earlier one of this command is removed."""
    from .recipes import get
    from .train.distributed import join
    from .train.loop import train

    if (run / "recipe.yaml").is_file():
        shutil.rmtree(run)
    with join(None) as world:
        outcome = train(get("quickstart"), run, world, quiet=quiet)
    return 0 if outcome.signal is None else 128 + outcome.signal
