"""The commands of training: recipes, train, eval, report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from . import cli_detect, cli_predict, cli_segment
from .cli_parser import add_group
from .cli_say import console, say, say_json, say_problems
from .progress import shown

# Commands that take the settings of a recipe as options.
OVERRIDDEN = ("train", "eval", "bench data", "token-labels make")

DEVICE = "where to run (default: cuda where there is one)"

Run = Callable[[argparse.Namespace], int | None]


def add_commands(commands: Any, benches: Any, add: Callable[[Any, str, Run, str], Any]) -> None:
    """Add the commands, and to `pale bench` that of data; `add(commands, name, run, help)` makes a parser."""

    def command(name: str, run: Run, help_: str) -> Any:
        return add(commands, name, run, help_)

    recipes = command("recipes", _recipes, "list what can be trained, or show one recipe")
    recipes.add_argument("show", nargs="?", choices=["show"], help="show one recipe as YAML")
    recipes.add_argument("name", nargs="?", help="for example imagenet.pale_t")
    recipes.epilog = "examples:\n  pale recipes\n  pale recipes show small_data.pale_t"

    train = command("train", _train, "train by a recipe, or go on with a run")
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help="`pale recipes` lists them")
    train.add_argument(
        "--config", type=Path, metavar="FILE", help="a recipe file, such as a run's recipe.yaml"
    )
    train.add_argument("--resume", type=Path, metavar="RUN", help="go on with a run")
    # Not --run: torchrun would take it for an abbreviation of its own --run-path.
    train.add_argument(
        "--output", type=Path, metavar="DIR", help="the run's folder (default runs/RECIPE)"
    )
    train.add_argument(
        "--init", type=Path, metavar="FILE", help="start the backbone from a classifier's weights"
    )
    train.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    train.epilog = (
        "Every setting of a recipe is an option too: --data.root DIR --optim.lr 1e-3 --epochs 10. "
        "`pale recipes show RECIPE` prints them all.\n\nexamples:\n"
        "  pale train quickstart\n"
        "  pale train small_data.pale_t --data.root DIR --output runs/mine\n"
        "  pale train --resume runs/mine\n"
        "  torchrun --nproc-per-node 8 -m pale train imagenet.pale_t --data.root DIR"
    )

    eval_ = command("eval", _eval, "evaluate a run or weights on the validation set")
    eval_.add_argument(
        "weights", type=Path, metavar="RUN", help="a run's folder, or a .safetensors file of one"
    )
    eval_.add_argument("--recipe", help="for foreign weights: the recipe that says model and data")
    eval_.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    eval_.add_argument(
        "--batch-size", type=int, default=64, help="classification: images at a time"
    )
    eval_.add_argument(
        "--protocol",
        choices=["single", "multi", "both"],
        default="both",
        help="segmentation: one scale, several scales with flip, or both",
    )
    eval_.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="segmentation, detection: folder for JSON and tables (default RUN/evaluation)",
    )
    eval_.epilog = (
        "Settings of the recipe are options too.\n\nexamples:\n"
        "  pale eval runs/mine\n"
        "  pale eval runs/mine --data.root OTHER --data.size 384"
    )

    bench = add(benches, "data", _bench_data, "measure how fast a recipe's pictures are read")
    bench.add_argument("recipe", metavar="RECIPE", help="`pale recipes` lists them")
    bench.add_argument("--seconds", type=float, default=20.0, help="to measure")
    bench.epilog = "Settings of the recipe are options: --data.root DIR --data.workers 16."
    cli_predict.add_predict(command)

    report = command("report", _report, "write report.html of a run, finished or not")
    report.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")

    features = command("features", _features, "write the embeddings of a folder of images")
    features.add_argument(
        "weights", type=Path, metavar="RUN", help="a run's folder, or a .safetensors file"
    )
    features.add_argument("root", type=Path, metavar="DIR", help="holds <class>/<picture>")
    features.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="out.safetensors"
    )
    features.add_argument("--recipe", help="for foreign weights: the recipe that says the model")
    features.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where the model runs"
    )
    features.add_argument("--workers", type=int, default=0, help="reading processes")

    probe = command("probe", _probe, "fit and score a linear classifier on features")
    probe.add_argument("train", type=Path, metavar="TRAIN", help="features to fit on")
    probe.add_argument("val", type=Path, metavar="VAL", help="features to score on")

    labels = add_group(commands, "token-labels", "make dense labels for the starred recipes")
    make = add(labels, "make", _token_labels, "write a teacher's dense labels for training")
    make.add_argument(
        "--model", required=True, metavar="MODEL", help="a run, or a classifier of timm's"
    )
    make.add_argument(
        "--weights", type=Path, metavar="FILE", help="of timm's model (default: timm's own)"
    )
    make.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="the store; a begun one goes on",
    )
    make.add_argument("--size", type=int, help="side the pictures get (default: the teacher's)")
    make.add_argument(
        "--k", type=int, help="classes at each place (default: 5, or all where there are fewer)"
    )
    make.add_argument("--shard", type=int, default=4096, help="pictures a file")
    make.add_argument("--batch-size", type=int, default=64, help="pictures at a time")
    make.add_argument(
        "--part", default="0/1", metavar="I/N", help="every N-th shard, for N machines"
    )
    make.add_argument("--seed", type=int, default=0, help="of the run: picks hold-out and scenes")
    make.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    make.epilog = (
        "Which pictures: --data.root DIR, --data.kind, --data.train, ... as in a recipe.\n\nexample:\n"
        "  pale token-labels make --model runs/teacher --data.root DIR --output labels"
    )

    kinds = add_group(commands, "data", "check and convert data sets before training")
    check = add(kinds, "check", _check, "find what is wrong with pictures, masks or boxes")
    check.add_argument(
        "root",
        type=Path,
        metavar="DIR",
        help="holds train/<class>/<picture> and val/..., or what --masks or --annotations speak of",
    )
    check.add_argument(
        "--splits",
        nargs="+",
        metavar="NAME",
        help="folders, shards or list files to look into",
    )
    check.add_argument(
        "--sheet", type=Path, metavar="FILE", help="also draw some pictures of each class: out.png"
    )
    check.add_argument("--workers", type=int, help="processes (default: one a core)")
    cli_segment.add_check(check)
    cli_detect.add_check(check)
    cli_detect.add_convert(add, kinds)
    pack = add(kinds, "pack", _pack, "pack folders of images into tar shards")
    pack.add_argument(
        "root", type=Path, metavar="DIR", help="holds train/<class>/<picture> and val/..."
    )
    pack.add_argument("output", type=Path, metavar="OUT", help="folder for the shards")
    pack.add_argument(
        "--splits", nargs="+", default=["train", "val"], metavar="NAME", help="folders to pack"
    )
    pack.add_argument("--shard-mb", type=float, default=256, help="size of a shard, in MiB")
    check.epilog = (
        "examples:\n"
        "  pale data check DIR --sheet sheet.png\n"
        "  pale data check DIR --images images --masks masks --classes classes.txt\n"
        "  pale data check DIR --images '{split}' --annotations 'annotations/{split}.json'"
    )


def take_overrides(argv: Sequence[str], known: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Split `--name value` and `--name=value` of settings from what the parser itself knows."""
    rest: list[str] = []
    overrides: dict[str, Any] = {}
    words = iter(argv)
    known = set(known)
    for word in words:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in known:
            rest.append(word)
            continue
        name = name.removeprefix("--")
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise ValueError(f"--{name} needs a value: --{name} VALUE")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            read = value
        # "{split}" is a place for a word, not a mapping without values.
        empty = isinstance(read, dict) and read and not any(v is not None for v in read.values())
        overrides[name] = value if empty else read
    return rest, overrides


def _recipes(args: argparse.Namespace) -> None:
    from . import recipes
    from .recipes.schema import text

    if args.show and not args.name:
        raise ValueError("show needs the name of a recipe; `pale recipes` lists them")
    if args.name:
        recipe = recipes.get(args.name)
        sys.stdout.write(json.dumps(recipe.plain(), indent=1) + "\n" if args.json else text(recipe))
        return
    all_ = {name: recipes.get(name) for name in recipes.RECIPES}
    if args.json:
        say_json({name: r.about for name, r in all_.items()})
        return
    table = Table("recipe", "what", "length", "batch")
    for name, recipe in all_.items():
        length = f"{recipe.epochs} epochs" if recipe.steps is None else f"{recipe.steps} steps"
        table.add_row(name, recipe.about, length, str(recipe.batch))
    console().print(table)
    console().print("pale recipes show NAME prints one; pale train NAME --data.root DIR runs it.")


def _train(args: argparse.Namespace) -> int:
    from .recipes import get
    from .recipes.schema import read
    from .train.distributed import join, leave
    from .train.loop import train

    given = [word for word in (args.recipe, args.config, args.resume) if word is not None]
    if len(given) != 1:
        raise ValueError(
            f"give one of a recipe, --config FILE and --resume RUN, got {len(given)}; "
            "`pale recipes` lists the recipes"
        )
    # torchrun --max-restarts runs the same command again: then it goes on.
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    with join(args.device) as world:
        if args.resume is not None:
            run, resume = args.resume, True
            if not (run / "recipe.yaml").is_file():
                raise ValueError(f"{run} is no run: it holds no recipe.yaml")
            recipe = read(run / "recipe.yaml")
        else:
            recipe = read(args.config) if args.config is not None else get(args.recipe)
            run = args.output or world.share(_free(Path("runs") / recipe.name))
            resume = restarted and (run / "recipe.yaml").is_file()
            if not resume and world.share((run / "log.jsonl").exists()):
                raise ValueError(
                    f"{run} holds a run already; go on with it: pale train --resume {run}, "
                    "or choose another folder: --output DIR"
                )
        if args.resume is not None:
            _require_no_start(args)
        if args.init is not None:
            recipe = recipe.started_from(args.init)
        outcome = train(recipe.override(args.overrides), run, world, resume=resume, quiet=args.json)
        if args.json and world.main:
            about = {"run": str(run), "step": outcome.step, "steps": outcome.steps}
            say_json(about | outcome.figures)
    code = 0 if outcome.signal is None else 128 + outcome.signal
    if world.size > 1:
        leave(code)
    return code


def _require_no_start(args: argparse.Namespace) -> None:
    """The checkpoint's weights would replace those that are named here."""
    given = ["init"] * (args.init is not None)
    given += [
        name for name in ("model.weights", "model.init", "model.new_head") if name in args.overrides
    ]
    if given:
        raise ValueError(f"a run that goes on has its weights; --{given[0]} belongs to a new one")


def _free(path: Path) -> Path:
    number, free = 1, path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _eval(args: argparse.Namespace) -> None:
    from . import weights as weight_files
    from .recipes import get
    from .recipes.schema import Detection, Segmentation, parse
    from .train.distributed import join
    from .train.evaluate import Evaluation

    weights = weight_files.load(args.weights)
    if args.recipe is None and "recipe" not in weights.about:
        raise ValueError(
            f"{args.weights} does not say which model it is for; name a recipe: --recipe imagenet.pale_t"
        )
    recipe = get(args.recipe) if args.recipe else parse(weights.about["recipe"], str(args.weights))
    # Its own weights are loaded below; those that training began with may be gone.
    recipe = recipe.override({"model.weights": None, "model.new_head": False})
    if isinstance(recipe, Segmentation):
        recipe = recipe.override({"model.init": None} | args.overrides)
        cli_segment.evaluate(args, recipe, weights)
        return
    if isinstance(recipe, Detection):
        recipe = recipe.override({"model.init": None} | args.overrides)
        cli_detect.evaluate(args, recipe, weights)
        return
    recipe = recipe.override(args.overrides)
    with join(args.device) as world:
        task = recipe.task(weights.about.get("classes"))
        model = task.model()
        weight_files.put(model, weights, args.weights, new_head=False)
        evaluation = Evaluation(task, world, args.batch_size, recipe.workers)
        track = shown(args.json, world.main)
        figures, _ = evaluation.run(model.to(world.device), None, track)
        if not world.main:
            return
    reported = recipe.reported.top1 if recipe.reported else None
    if args.json:
        say_json(figures | {"paper_top1": reported})
        return
    paper = f" (the paper: {reported:g})" if reported is not None else ""
    console().print(
        f"top-1 {figures['top1']:.2f} %{paper}, top-5 {figures['top5']:.2f} %, loss {figures['loss']:.4f}, "
        f"{figures['images']:.0f} images"
    )


def _bench_data(args: argparse.Namespace) -> None:
    from .bench_data import measure
    from .recipes import get

    recipe = get(args.recipe).override(args.overrides)
    with Console(stderr=True).status(f"reading pictures for {args.seconds:g} s"):
        found = measure(recipe, args.seconds)
    if args.json:
        say_json(found)
        return
    say(
        f"{found['images_per_s']:.0f} images/s with {found['workers']} workers, "
        f"{found['worker_ms']:.2f} ms of a worker for each "
        f"({found['images']} images in {found['seconds']:.1f} s, batch {found['batch']})"
    )


def _report(args: argparse.Namespace) -> None:
    from .train.report import write

    path = write(args.folder)
    sys.stdout.write(json.dumps({"report": str(path)}) + "\n" if args.json else f"{path} written\n")


def _features(args: argparse.Namespace) -> None:
    from .data.images import folder
    from .features import backbone, extract

    model, recipe = backbone(args.weights, args.recipe)
    found = extract(
        model,
        folder(args.root),
        recipe.data.size,
        recipe.data.crop,
        workers=args.workers,
        device=args.device,
        track=shown(args.json),
    )
    found.save(args.output)
    count, width = found.vectors.shape
    if args.json:
        say_json({"pictures": count, "features": width}, None)
    else:
        say(f"{args.output}: {count} pictures, {width} features each")


def _probe(args: argparse.Namespace) -> None:
    from .features import Features, probe

    found = probe(Features.load(args.train), Features.load(args.val))
    if args.json:
        say_json(vars(found), None)
    else:
        say(f"top-1 {found.val:.2f} % (fitted on {found.train:.2f} %), penalty {found.strength:g}")


def _token_labels(args: argparse.Namespace) -> None:
    from dataclasses import asdict

    import torch

    from . import teacher
    from .recipes.schema import Classification

    if other := [name for name in args.overrides if not name.startswith("data.")]:
        raise ValueError(f"--{other[0]} is no option here; of a recipe's settings, --data.* are")
    part = args.part.split("/")
    if len(part) != 2 or not all(word.isdigit() for word in part):
        raise ValueError(f"--part must be I/N, such as 0/4, got {args.part!r}")
    for name in ("k", "shard", "batch_size"):
        if (given := getattr(args, name)) is not None and given < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least 1, got {given}")
    data = Classification().override(args.overrides).data
    source = data.train_source(args.seed)
    found = teacher.find(args.model, source.classes, args.weights, args.size)
    made = teacher.make(
        found,
        source,
        args.output,
        k=args.k or min(5, len(source.classes)),
        shard=args.shard,
        batch=args.batch_size,
        workers=data.workers,
        device=args.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        part=(int(part[0]), int(part[1])),
        tell=(lambda line: None) if args.json else say,
        track=shown(args.json),
    )
    if args.json:
        say_json(asdict(made) | {"classes": len(made.classes)})
        return
    h, w = made.grid
    if made.agreement is None:
        say(f"{args.output}: other parts are still to be written")
        return
    say(
        f"{args.output}: {made.pictures} pictures, {h}x{w} places, {made.k} classes at each; the picture's own "
        f"class is the first in {made.agreement:.1f} %"
    )
    say(
        f"train with: pale train RECIPE --token_labels.store {args.output} and the same --data options; RECIPE is "
        "imagenet.pale_t_star for ImageNet, small_data.pale_t_star for a small set"
    )


def _check(args: argparse.Namespace) -> int:
    from .data.check import check, sheet

    if args.annotations:
        return cli_detect.check(args)
    if cli_segment.wants_masks(args):
        return cli_segment.check(args)
    found = check(args.root, tuple(args.splits), args.workers, shown(args.json))
    if args.json:
        say_json(found.plain())
    else:
        for split, labels in found.counts.items():
            say(f"{split}: {sum(labels.values())} pictures in {len(labels)} classes")
        say_problems(found)
    if args.sheet:
        split = next(iter(found.counts))
        drawn = sheet(args.root, split, args.sheet)
        if not args.json:
            say(f"{args.sheet} written: {drawn} of {split}")
    return 0 if found.good else 1


def _pack(args: argparse.Namespace) -> None:
    from .data.images import folder
    from .data.shards import pack

    if args.shard_mb <= 0:
        raise ValueError(f"--shard-mb must be greater than 0, got {args.shard_mb:g}")
    classes, written = None, {}
    sources = {}
    for split in args.splits:
        sources[split] = folder(args.root / split, classes)
        classes = sources[split].classes
    for split, source in sources.items():
        size, track = int(args.shard_mb * 2**20), shown(args.json)
        paths = pack(source, args.output, split, size, track=track)
        written[split] = {"pictures": len(source), "shards": len(paths)}
    if args.json:
        say_json(written)
        return
    for split, counts in written.items():
        say(f"{split}: {counts['pictures']} pictures in {counts['shards']} shards")
    say(f"train with: pale train RECIPE --data.kind shards --data.root {args.output}")
