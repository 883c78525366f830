"""`pale predict`: pictures, folders and videos, for all three tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .progress import shown

if TYPE_CHECKING:
    from .predict import Failed, Prediction, Predictor
    from .predict.files import Folder

Run = Callable[[argparse.Namespace], int | None]
SHOWN = 5  # failures that are told one by one


def add_predict(command: Callable[[str, Run, str], Any]) -> None:
    """Add `pale predict`."""
    predict = command("predict", _predict, "say what is in pictures, folders of them, or videos")
    predict.add_argument(
        "pictures", type=Path, nargs="+", metavar="PICTURE", help="files, folders, videos"
    )
    predict.add_argument(
        "--weights",
        metavar="MODEL",
        help="a run's folder, a .safetensors file of one, or a name that pale weights lists (default: the package's "
        "own for the task)",
    )
    predict.add_argument(
        "--task",
        choices=["classification", "segmentation", "detection"],
        help="default: what the weights are for, or classification",
    )
    predict.add_argument(
        "-o", "--output", type=Path, help="folder for JSON, CSV, masks and drawn pictures"
    )
    predict.add_argument("--recipe", help="for foreign weights: the recipe that says the model")
    predict.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where there is one"
    )
    predict.add_argument("--batch", type=int, help="pictures at a time (default 16, or 4)")
    predict.add_argument(
        "--top", type=int, default=5, help="classifier: how many classes (default 5)"
    )
    predict.add_argument(
        "--score", type=float, default=0.5, help="detector: least score of an object (default 0.5)"
    )
    predict.add_argument(
        "--own-size", action="store_true", help="segmenter, detector: do not resize before"
    )
    predict.add_argument("--slide", action="store_true", help="segmenter: windows, if large")
    predict.add_argument("--multi", action="store_true", help="segmenter: several scales, flipped")
    predict.add_argument(
        "--every", type=int, default=1, metavar="N", help="video: every Nth frame (default 1)"
    )
    predict.add_argument("--no-drawing", action="store_true", help="write no drawn pictures")
    predict.epilog = (
        "A file that cannot be read is told at the end and does not stop the rest; the exit code is then 1. "
        "Ctrl-C keeps what is done."
    )


def _predict(args: argparse.Namespace) -> int:
    from .data.images import pictures
    from .predict import Predictor
    from .predict.files import Folder
    from .predict.video import SUFFIXES

    if args.every < 1:
        raise ValueError(f"--every must be at least 1, got {args.every}")
    videos = [path for path in args.pictures if path.suffix.lower() in SUFFIXES and path.is_file()]
    others = [path for path in args.pictures if path not in videos]
    found = pictures(others) if others else []
    predictor = Predictor(
        args.weights,
        args.task,
        recipe=args.recipe,
        device=args.device,
        top=args.top,
        score=args.score,
        own_size=args.own_size,
        slide=args.slide,
        multi=args.multi,
        batch=args.batch,
    )
    if not predictor.loaded.trained:
        _note(f"{predictor.loaded.name} is untrained: what it says means nothing; give a run")
    failed: list[Failed] = []
    folder = Folder(args.output, not args.no_drawing) if args.output else None
    done = 0
    try:
        for said in _pictures(predictor, found, folder, args.json, failed):
            done += 1
            _tell(said, args.json)
        for video in videos:
            done += _film(predictor, video, folder, args, failed)
    except KeyboardInterrupt:
        _note(f"interrupted after {done} of {len(found)} pictures" + _kept(args.output))
        return 130
    finally:
        if folder is not None:
            folder.__exit__(None, None, None)
    for each in failed[:SHOWN]:
        _note(f"pale: {each.reason}")
    if len(failed) > SHOWN:
        _note(f"pale: and {len(failed) - SHOWN} more that failed")
    if args.output and not args.json:
        _note(f"{args.output} written: {done} of {done + len(failed)} pictures")
    return 1 if failed else 0


def _pictures(
    predictor: Predictor,
    found: list[tuple[Path, str]],
    folder: Folder | None,
    plain: bool,
    failed: list[Failed],
) -> Iterator[Prediction]:
    """Predictions as they come, written and counted."""
    from .predict import Failed

    stems = {str(path): stem for path, stem in found}
    stream = predictor.stream(path for path, _ in found)
    for said in shown(plain)(stream, "predicting", len(found)):
        if isinstance(said, Failed):
            failed.append(said)
            continue
        if folder is not None:
            folder.add(said, stems[said.name])
        yield said


def _film(
    predictor: Predictor,
    path: Path,
    folder: Folder | None,
    args: argparse.Namespace,
    failed: list[Failed],
) -> int:
    """A video's frames, as lines and as a film of the drawn ones; how many."""
    from .predict import Failed
    from .predict.video import Film, frames, read_about

    done = 0
    try:
        target = (args.output or Path()) / f"{path.stem}_predicted.mp4"
        about = read_about(path)
        with Film(target, about.rate / args.every) as film:
            every = frames(path, args.every)
            for frame in shown(args.json)(every, path.name, about.frames // args.every):
                said = predictor(frame.picture, str(path))
                where = {"frame": frame.number, "seconds": round(frame.seconds, 3)}
                if folder is not None:
                    folder.add(said, None, where)
                    if folder.drawn:
                        film.add(said.draw())
                done += 1
                _tell(said, args.json, where)
    except ValueError as error:
        failed.append(Failed(str(path), str(error)))
    return done


def _tell(said: Prediction, plain: bool, where: dict[str, Any] | None = None) -> None:
    if plain:
        sys.stdout.write(json.dumps(said.plain() | (where or {})) + "\n")
        return
    at = f", {where['seconds']:.2f} s" if where else ""
    sys.stdout.write(f"{said.name}{at}: {said.words()}\n")


def _kept(output: Path | None) -> str:
    return f"; {output} holds them" if output else ""


def _note(text: str) -> None:
    sys.stderr.write(text + "\n")
