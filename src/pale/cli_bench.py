"""The commands that measure speed: bench models, bench op; bench data is with training's."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from .cli_parser import add_command
from .cli_say import console


def add_commands(kinds: Any) -> None:
    """Add them to `pale bench`."""
    models = add_command(
        kinds, "models", _models, "measure whole models, ours beside timm's", json=False
    )
    models.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="ours first (default pale_tiny swin_tiny_patch4_window7_224)",
    )
    models.add_argument(
        "--task",
        nargs="+",
        default=["inference"],
        choices=["inference", "training", "latency"],
        help="what to time; latency is batch 1, as a CUDA graph on a GPU",
    )
    models.add_argument(
        "--mode",
        nargs="+",
        default=["eager"],
        choices=["eager", "compiled", "graphs"],
        help="as it is, by torch.compile, or as CUDA graphs",
    )
    models.add_argument(
        "--batch", type=int, nargs="+", default=[], help="images (default 256 on CUDA, 8 on a CPU)"
    )
    models.add_argument("--autocast", action="store_true", help="inference with fp32 weights")
    models.add_argument("--features", action="store_true", help="without the classifier")
    models.add_argument("--optimized", action="store_true", help="ours through pale.optimize")
    models.epilog = (
        "`models` may be left out.\n\nexamples:\n"
        "  pale bench\n"
        "  pale bench pale_tiny convnext_tiny --batch 1 8 --mode eager compiled\n"
        "  pale bench --task training --device cuda --json speed.json --plot speed.png"
    )

    op = add_command(
        kinds,
        "op",
        _op,
        "measure the attention and each fused piece of a block beside plain PyTorch",
        json=False,
    )
    op.add_argument(
        "model", nargs="?", default="pale_tiny", help="whose stages (default pale_tiny)"
    )
    op.add_argument("--batch", type=int, help="images (default 256 on CUDA, 2 on a CPU)")
    op.add_argument(
        "--stages", type=int, nargs="+", default=[], metavar="N", help="1 to 4 (default all)"
    )
    op.add_argument(
        "--pieces",
        nargs="+",
        default=[],
        metavar="PIECE",
        help="attention, mlp, ... (default all)",
    )
    op.add_argument(
        "--kernels",
        nargs="+",
        default=[],
        metavar="K",
        help="of plain attention: flash, efficient, cudnn (default all)",
    )
    for parser in (models, op):
        parser.add_argument(
            "--size",
            type=int,
            nargs="+",
            default=[224],
            metavar="N",
            help="side, or height and width",
        )
        parser.add_argument(
            "--device", default="auto", choices=["auto", "cpu", "cuda"], help="where to run"
        )
        parser.add_argument(
            "--dtype",
            default="auto",
            choices=["auto", "fp32", "bf16", "fp16"],
            help="of the numbers (default bf16 on CUDA, fp32 on a CPU)",
        )
        parser.add_argument("--rounds", type=int, default=30, help="times that each is run")
        parser.add_argument("--seconds", type=float, default=60.0, help="to measure a row at most")
        parser.add_argument("--threads", type=int, help="of PyTorch on the CPU")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bars, in a .png")


def _setting(args: argparse.Namespace, **more: bool) -> Any:
    """The setting, after what can be wrong has been looked at: minutes of measuring should not end in a typo."""
    import torch

    from .bench import Setting, check_suffix

    if len(args.size) > 2:
        raise ValueError(f"--size needs a side, or height and width, got {len(args.size)} numbers")
    if args.plot:
        check_suffix(args.plot)
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    size = (args.size[0], args.size[-1])
    return Setting(size, args.device, args.dtype, args.rounds, args.seconds, **more)


def _tell(what: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"measuring: {what}\n")


def _models(args: argparse.Namespace) -> None:
    from .bench import MODELS, bench

    setting = _setting(
        args, autocast=args.autocast, features=args.features, optimized=args.optimized
    )
    models = args.models or list(MODELS)
    report = bench(models, setting, tasks=args.task, modes=args.mode, batches=args.batch, say=_tell)
    table = Table(
        "task",
        "mode",
        "batch",
        "model",
        "images/s",
        "ms (quartiles)",
        "ours / it",
        "peak",
        "of matrix",
    )
    for row in report["rows"]:
        if row["model"] == models[0] and table.row_count:
            table.add_section()
        cells = [row["task"], row["mode"], str(row["batch"]), row["model"]]
        if row["error"]:
            table.add_row(*cells, "failed, see below")
            continue
        low, high = row["quartiles"]
        table.add_row(
            *cells,
            f"{row['images_per_s']:.1f}",
            f"{row['ms']:.2f} ({low:.2f} to {high:.2f})",
            _or(row["ratio"], "{:.2f}"),
            _or(row["peak_bytes"] and row["peak_bytes"] / 2**20, "{:.0f} MiB"),
            _or(row["matrix_share"], "{:.1%}"),
        )
    _end(args, report, table)
    for row in report["rows"]:
        if row["error"]:
            sys.stderr.write(f"{row['model']}, {row['task']}, {row['mode']}: {row['error']}\n")
    if any(row["error"] for row in report["rows"] if row["model"] == models[0]):
        raise ValueError(f"{models[0]} failed; only other models may")


def _op(args: argparse.Namespace) -> None:
    from .bench_op import bench_op

    report = bench_op(
        args.model,
        _setting(args),
        batch=args.batch,
        stages=args.stages,
        pieces=args.pieces,
        kernels=args.kernels,
        say=_tell,
    )
    table = Table("piece", "pass", "stage", "map", "ms", "plain / fused", "MB at least", "of copy")
    last = None
    for row in report["rows"]:
        group = f"{row['piece']}, {row['passes']}"
        if last not in (None, group):
            table.add_section()
        last = group
        times = [f"{name} {ms:.4f}" for name, ms in row["ms"].items()]
        table.add_row(
            row["piece"],
            row["passes"],
            str(row["stage"]),
            "x".join(map(str, row["map"])),
            ", ".join(times + [f"{name} failed" for name in row["errors"]]),
            _or(row["ratio"], "{:.2f}"),
            f"{row['bytes'] / 1e6:.1f}",
            _or(row["copy_share"], "{:.1%}"),
        )
    _end(args, report, table)
    for name, mean in report["means"].items():
        console().print(
            f"{name}: {mean:.2f} times as fast as the best plain version (geometric mean)"
        )
    if report["note"]:
        console().print(report["note"])
    for row in report["rows"]:
        for name, error in row["errors"].items():
            sys.stderr.write(f"{row['piece']}, stage {row['stage']}, {name}: {error}\n")


def _end(args: argparse.Namespace, report: dict[str, Any], table: Table) -> None:
    """What both tables have above and below them, and the files."""
    from .bench import save_plot

    about, roof = report["about"], report["ceilings"]
    about["command"] = args.typed
    h, w = about["setting"]["size"]
    packages = f"torch {about['packages']['torch']}, timm {about['packages']['timm']}"
    console().print(f"{about['hardware']}, {about['setting']['dtype']}, {h}x{w}, {packages}")
    console().print(table)
    console().print(
        f"Ceilings, measured: matrix product {roof['matrix'] / 1e12:.3g} TFLOP/s, "
        f"copy {roof['copy'] / 1e9:.3g} GB/s read and written."
    )
    if report["warning"]:
        console().print(f"Warning: {report['warning']}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        save_plot(report, args.plot)


def _or(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)
