"""The commands for using a model: export, and view attention."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .cli_say import console, say, say_json

Run = Callable[[argparse.Namespace], int | None]
SOURCE = "a run's folder, a .safetensors file, or a model's name"


def add_export(command: Callable[[str, Run, str], Any]) -> None:
    """Add `pale export`."""
    export = command("export", _export, "write a model as a file that runs without this package")
    export.add_argument("source", metavar="MODEL", help=SOURCE)
    export.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="model.pt2 or model.onnx"
    )
    export.add_argument(
        "--format",
        metavar="FORMAT",
        help="pt2 (torch.export), aoti (AOTInductor), onnx, or int8 (ONNX, quantised); "
        "default: by the suffix, .pt2 or .onnx",
    )
    export.add_argument("--recipe", help="for foreign weights: the recipe that says the model")
    export.add_argument("--device", default="cpu", help="aoti: cpu or cuda")
    export.add_argument("--opset", type=int, default=20, help="of ONNX, 20 or more")
    export.add_argument(
        "--sizes",
        nargs="+",
        metavar="BxHxW",
        help="to check at, such as 1x224x224 2x180x257 (default: three about the model's own)",
    )
    export.add_argument(
        "--fixed", action="store_true", help="for the first size alone, any batch; e.g. Swin"
    )
    export.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="pictures to compare on; in folders named as the classes, with the accuracy",
    )
    export.add_argument("--threads", type=int, help="of PyTorch and onnxruntime on the CPU")
    export.epilog = (
        "One file serves every batch and size. It is checked against PyTorch before it is written. "
        "examples/onnx_predict.py runs an ONNX file without PyTorch.\n\nexamples:\n"
        "  pale export runs/mine -o model.onnx\n"
        "  pale export runs/mine --format int8 -o small.onnx --data DIR/val"
    )


def add_attention(views: Any) -> None:
    """Add `pale view attention`."""
    attention = views.add_parser(
        "attention",
        help="draw what a model looks at in a photo: pales, attention, rollout, Grad-CAM",
        description="Draw what a token of a photo attends to in each stage, with the true weights; where its content "
        "comes from (rollout); and what speaks for a class (Grad-CAM).",
        epilog="A page (.html) is interactive and needs no server: move over the photo.\n\nexamples:\n"
        "  pale view attention photo.jpg -o look.html\n"
        "  pale view attention photo.jpg --weights runs/mine --point 310 180 -o look.png",
    )
    attention.set_defaults(run=_attention, parser=attention)
    attention.add_argument("photo", type=Path, metavar="PHOTO", help="a picture")
    attention.add_argument(
        "--point",
        type=float,
        nargs=2,
        metavar=("X", "Y"),
        help="in pixels of the photo (default: the centre)",
    )
    attention.add_argument(
        "--weights",
        metavar="MODEL",
        help=f"{SOURCE} (default: the classifier that comes with the package)",
    )
    attention.add_argument("--recipe", help="for foreign weights: the recipe that says the model")
    attention.add_argument(
        "--stage", type=int, help="1 to 4: show its blocks (default: all stages)"
    )
    attention.add_argument("--block", type=int, help="from 1 (default: the last of each stage)")
    attention.add_argument("--head", default="mean", help="mean, rows, columns, or a number from 1")
    attention.add_argument(
        "--class",
        dest="class_name",
        metavar="NAME",
        help="for Grad-CAM, name or number (default: the best)",
    )
    attention.add_argument(
        "--size", type=int, help="short side as the model sees it (default: as trained, or 224)"
    )
    attention.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="out.png, or out.html for the page",
    )
    attention.add_argument("--json", action="store_true", help="print JSON")


def _export(args: argparse.Namespace) -> None:
    import torch

    from .export import export

    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    with Console(stderr=True).status("loading") as status:
        done = export(
            args.source,
            args.output,
            args.format,
            recipe=args.recipe,
            device=args.device,
            fixed=args.fixed,
            opset=args.opset,
            sizes=_sizes(args.sizes) if args.sizes else None,
            data=args.data,
            say=status.update,
        )
    if args.json:
        say_json(done.plain())
        return
    table = Table("batch", "size", "largest difference", "of the largest logit")
    for name in ("PyTorch, ms", f"{done.format}, ms", "times as fast"):
        table.add_column(name, justify="right")
    for check in done.checks:
        b, h, w = check.size
        table.add_row(
            str(b),
            f"{h}x{w}",
            f"{check.difference:.2e}",
            f"{check.share:.1e}",
            f"{check.torch_ms:.1f}",
            f"{check.ms:.1f}",
            f"{check.torch_ms / check.ms:.2f}",
        )
    console().print(table)
    if done.data is not None:
        what = {"classification": "pictures", "segmentation": "pixels", "detection": "objects"}[
            done.about["task"]
        ]
        line = f"{done.data.pictures} pictures: the same class on {done.data.agreement:.2f} % of the {what}"
        if done.data.top1 is not None:
            line += f"; top-1 {done.data.top1_file:.2f} %, PyTorch {done.data.top1:.2f} %"
        say(line)
    elif done.format == "int8":
        say("int8 changes the logits; --data DIR shows what that does to the classes of pictures")
    if not done.about["trained"]:
        say("the weights are untrained")
    where = f" for {done.device}" if done.format == "aoti" else ""
    say(
        f"{done.path} written: {done.format}{where}, {done.bytes / 1e6:.1f} MB, "
        f"{len(done.about['classes']) or 'unnamed'} classes"
    )


def _sizes(words: list[str]) -> list[tuple[int, int, int]]:
    found = []
    for word in words:
        parts = word.lower().split("x")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ValueError(f"--sizes are batch x height x width, such as 1x224x224, got {word!r}")
        found.append((int(parts[0]), int(parts[1]), int(parts[2])))
    return found


def _attention(args: argparse.Namespace) -> None:
    from .view_attention import look
    from .view_sheet import centre, check_suffix, save

    check_suffix(args.output)
    for name in ("stage", "block"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} counts from 1, got {getattr(args, name)}")
    seen = look(args.photo, args.weights, recipe=args.recipe, size=args.size)
    point = tuple(args.point) if args.point else centre(seen)
    number = seen.class_number(args.class_name) if args.class_name is not None else None
    save(
        seen,
        args.output,
        point,
        stage=None if args.stage is None else args.stage - 1,
        block=-1 if args.block is None else args.block - 1,
        head=args.head,
        number=number,
        title=args.photo.name,
    )
    best = seen.scores[:5]
    if args.json:
        about = {
            "output": str(args.output),
            "model": seen.loaded.name,
            "trained": seen.loaded.trained,
            "point": point,
            "tokens": [seen.token(point, s) for s in range(len(seen.stages))],
            "maps": [list(blocks[0].q.shape[:2]) for blocks in seen.stages],
            "classes": [vars(score) for score in best],
        }
        say_json(about)
        return
    if seen.loaded.trained:
        say(", ".join(f"{score.name} {100 * score.share:.1f} %" for score in best))
    else:
        say(
            f"{seen.loaded.name} is untrained: pales are true, attention is that of random weights; "
            "give --weights RUN"
        )
    say(f"{args.output} written, {args.output.stat().st_size / 1e6:.1f} MB")
