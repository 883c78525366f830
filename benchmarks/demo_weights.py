"""Make the weights that come with the package: three tasks on pet photos, beside a timm model of the same size.

    python benchmarks/demo_weights.py DATA OUT                         # ours, packed, with cards; then the peers
    python benchmarks/demo_weights.py DATA OUT --jobs 4 --workers 4    # on a large GPU, four runs at once
    python benchmarks/demo_weights.py DATA OUT --minutes 9             # stop after 9 minutes; run it again to resume
    python benchmarks/demo_weights.py DATA OUT --start general_nano --classify '--epochs 40' --peers ''
    python benchmarks/demo_weights.py DATA OUT --hold-out 0.1 --only classify --classify '--optim.lr 2e-3'   # to choose
    python benchmarks/demo_weights.py DATA OUT --toy --peers ''        # a few steps on a CPU, to try the script

DATA holds oxford-iiit-pet/. All models use the same recipes, heads and settings (demo.*): the classifier is trained
from scratch or from --start; segmenter and detector start from the backbone of the classifier of the same model and
seed, or with --independent as the classifier does. The weights of the last step are measured. Seed 0 of our model is
packed, whatever other seeds reach; its card reports the packed file.

OUT gets NAME.safetensors, NAME.md, index.json and demo_weights.json (every run's figures): all but the last are the
files of src/pale/weights/zoo. The runs themselves are under --runs. Finished runs are not repeated; an interrupted run
resumes. With --hold-out nothing is packed, and the test photos are not read.
"""

import argparse
import hashlib
import json
import shlex
import shutil
import statistics
import subprocess
import textwrap
import time
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from common import (
    StoppedError,
    about,
    add_jobs,
    alone,
    done,
    mean,
    output,
    pale,
    pool,
    speeds,
    stoppable,
    summary,
)

from pale.data.decoding import read_image
from pale.predict.bundle import ModelBundle, load
from pale.recipes import get
from pale.tools.measure import measure
from pale.tools.publish import pack, read
from pale.train.distributed import join
from pale.weights import zoo
from pale.weights.read import load_weights

OURS = "pale_nano"
TAG = "pets"  # in timm: pale_nano.pets
LICENSE = "apache-2.0"
PHOTOS = 64  # to compare logits before and after packing


@dataclass(frozen=True)
class Plan:
    """A task: its recipe, the columns of its table, and what makes it a matter of seconds on a CPU."""

    name: str
    kind: str
    columns: dict[str, str]
    toy: str
    batch: int = 32

    @property
    def recipe(self) -> str:
        return f"demo.{self.name}"


PLANS = {
    "classify": Plan(
        "classify_pets",
        "classification",
        {"top1": "top-1", "top5": "top-5"},
        "--data.size 64 --batch 16 --steps 6 --warmup_steps 2",
    ),
    "segment": Plan(
        "segment_pets",
        "segmentation",
        {"miou": "mIoU", "macc": "mAcc", "aacc": "pixel accuracy"},
        "--augment.crop 64 --augment.short 64 --test.short 64 --batch 8 --steps 3 --warmup_steps 1",
    ),
    "detect": Plan(
        "detect_pets",
        "detection",
        {
            "box_ap": "box AP",
            "box_ap50": "box AP50",
            "mask_ap": "mask AP",
            "mask_ap50": "mask AP50",
        },
        "--augment.crop 80 --augment.short 80 --test.short 80 --data.limit 24 --batch 4 --steps 3 --warmup_steps 1",
    ),
}


def train(args: argparse.Namespace, run: Path, words: list[object]) -> bool:
    """Train or resume a run unless it is finished; return whether its steps were CUDA graphs."""
    with alone(run):
        return train_alone(args, run, words)


def train_alone(args: argparse.Namespace, run: Path, words: list[object]) -> bool:
    eager = run.with_name(f"{run.name}.eager")
    recipe = get(str(words[0])).override({"model.name": words[words.index("--model.name") + 1]})
    recorded = recipe.uses_cuda_graph(torch.cuda.is_available(), 1)
    graph = recorded and "--cuda_graph" not in words and not eager.exists()
    if done(run):
        return graph
    if run in args.failed:
        raise RuntimeError(args.failed[run])
    if late(args):
        raise StoppedError
    if list((run / "checkpoints").glob("step_*")):
        command = ["train", "--resume", run]
    else:
        shutil.rmtree(run, ignore_errors=True)
        output(run).unlink(missing_ok=True)
        plain = ["--cuda_graph", "false"] if eager.exists() else []
        command = ["train", *words, *plain, "--output", run]
    try:
        pale(*command, run=run, jobs=args.jobs, deadline=args.deadline)
    except subprocess.CalledProcessError as error:
        if graph:
            print(f"{run.name} failed; trying again without CUDA graphs", flush=True)
            eager.touch()
            shutil.rmtree(run, ignore_errors=True)
            return train_alone(args, run, words)
        args.failed[run] = f"{run} failed with exit code {error.returncode}"
        raise RuntimeError(args.failed[run]) from None
    return graph


def late(args: argparse.Namespace) -> bool:
    """Return whether too little time is left to start a run."""
    return time.monotonic() > args.deadline - 20


def settings(args: argparse.Namespace, task: str) -> list[str]:
    words = [*shlex.split(PLANS[task].toy), "--log_every", "1"] if args.toy else []
    words += shlex.split(getattr(args, task))
    if args.hold_out:
        words += ["--data.hold_out", str(args.hold_out)]
    return words


def key(args: argparse.Namespace, task: str) -> str:
    """Return a hash of everything but model and seed that the result depends on."""
    parts = [get(PLANS[task].recipe).plain(), settings(args, task)]
    if task != "classify":
        parts.append(None if args.independent else key(args, "classify"))
    if args.start and (task == "classify" or args.independent):
        parts.append(args.start)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]


def trained(args: argparse.Namespace, task: str, model: str, seed: int) -> tuple[Path, bool]:
    """Train the run of a task, after that of its classifier; return its folder and whether it used CUDA graphs."""
    words: list[object] = [PLANS[task].recipe, "--data.root", args.data / "oxford-iiit-pet"]
    words += ["--model.name", model, "--seed", seed, "--data.workers", args.workers]
    words += ["--saving.every_minutes", 1, *settings(args, task)]
    if task == "classify" or args.independent:
        words += ["--init", args.start] if args.start else []
    else:
        words += ["--init", classifier(args, model, seed)]
    run = args.runs / f"{task}_{model}_{seed}_{key(args, task)}"
    return run, train(args, run, words)


def classifier(args: argparse.Namespace, model: str, seed: int) -> Path:
    """Return the weights that segmenter and detector start from; for our model the packed file, as users have it."""
    if packs(args, model, seed):
        row(args, "classify", model, seed)
        return args.out / f"{PLANS['classify'].name}.safetensors"
    return trained(args, "classify", model, seed)[0]


def packs(args: argparse.Namespace, model: str, seed: int) -> bool:
    """Return whether the weights of a run are included in the package."""
    return model == OURS and seed == 0 and not args.hold_out


def identity(args: argparse.Namespace, task: str, model: str, seed: int) -> dict:
    """Return the values that identify a row."""
    found = {"task": task, "model": model, "seed": seed, "key": key(args, task)}
    independent = task == "classify" or args.independent
    start = args.start if independent else PLANS["classify"].name
    return found | {"settings": settings(args, task), "start": start}


def known(args: argparse.Namespace, task: str, model: str, seed: int) -> dict | None:
    """Return the row of an earlier call with the same settings, unless its file is missing."""
    own = identity(args, task, model, seed)
    if packs(args, model, seed) and not zoo.find_file(PLANS[task].name, args.out):
        return None
    return next((r for r in args.rows if all(r.get(k) == v for k, v in own.items())), None)


def row(args: argparse.Namespace, task: str, model: str, seed: int) -> dict:
    """Return the figures of a run, or those of an earlier call with the same settings."""
    if earlier := known(args, task, model, seed):
        return earlier
    own = identity(args, task, model, seed)
    run, graph = trained(args, task, model, seed)
    if packs(args, model, seed) and late(args):  # measuring takes time too
        raise StoppedError
    args.rows[:] = [r for r in args.rows if any(r.get(k) != v for k, v in own.items())]
    if not args.hold_out:  # a card shows one setting only
        args.rows[:] = [r for r in args.rows if r["task"] != task or r["key"] == own["key"]]
    found = own | summary(run) | {"cuda_graph": graph, "params": parameters(run)}
    print(f"{task}, {model}, seed {seed}: {figures(PLANS[task], found['val'])}", flush=True)
    args.rows.append(found)
    if packs(args, model, seed):
        publish(args, task, run, found)
    write(args)
    return found


def ahead(args: argparse.Namespace, plan: list[tuple[str, str, int]]) -> None:
    """Train all runs of a plan, several at once: classifiers first, then the runs that start from them.

    Rows are computed later, except for the packed classifier that our segmenter and detector start from; that also
    reports runs that failed or were stopped.
    """
    plan = [item for item in plan if known(args, *item) is None]
    first = [item for item in plan if item[0] == "classify"]
    rest = [item for item in plan if item[0] != "classify"]
    if not args.independent:  # classifiers that the rest starts from
        first = list(dict.fromkeys(first + [("classify", model, seed) for _, model, seed in rest]))
    with pool(args.jobs) as executor:
        started = {executor.submit(trained, args, *item): item for item in first}
        after = [executor.submit(trained, args, *item) for item in rest if args.independent]
        for future in as_completed(started):
            _, *which = item = started[future]
            with suppress(StoppedError, RuntimeError):
                future.result()
                followers = [] if args.independent else [i for i in rest if list(i[1:]) == which]
                if followers and packs(args, *which):
                    row(args, *item)
                after += [executor.submit(trained, args, *follower) for follower in followers]
        for future in after:
            with suppress(StoppedError, RuntimeError):
                future.result()


def parameters(run: Path) -> int:
    """Return the number of parameters, without the buffers of batch norm."""
    counted = ("running_mean", "running_var", "num_batches_tracked")
    tensors = load_weights(run).tensors
    return sum(t.numel() for n, t in tensors.items() if n.rpartition(".")[2] not in counted)


def publish(args: argparse.Namespace, task: str, run: Path, found: dict) -> None:
    """Pack, measure the packed file, and note it in the index."""
    plan = PLANS[task]
    path = args.out / f"{plan.name}.safetensors"
    license = license_of(args)
    size = pack(run, path, license=license)
    root = args.data / "oxford-iiit-pet"
    with join() as world:
        found["packed"] = measure(path, root, world, batch=plan.batch, workers=args.workers)
    found["packing"] = {"bytes": size} | (effect(run, path, root) if task != "detect" else {})
    words = ["pale", "train", plan.recipe, "--data.root", "oxford-iiit-pet"]
    words += settings(args, task)
    if found["start"]:
        words += ["--init", found["start"]]
    bundle = load(path)
    entry = zoo.ZooEntry(
        plan.name,
        plan.kind,
        OURS,
        path.name,
        f"{plan.name}.md",
        size,
        zoo.file_sha256(path),
        found["params"],
        len(bundle.classes),
        {k: round(v, 4) for k, v in found["packed"].items()},
        "Oxford-IIIT Pet, trainval and test" + (", a toy run" if args.toy else ""),
        plan.recipe,
        shlex.join(words),
        license,
        timm_part(bundle) if task == "classify" else {},
    )
    (args.out / entry.card).write_text(f"# {plan.name}\n")
    zoo.add_entry(entry, args.out)


def license_of(args: argparse.Namespace) -> str:
    """Return the licence of the weights: that of the weights they start from, if any."""
    return (zoo.get_entry(args.start).license if args.start else None) or LICENSE


def timm_part(bundle: ModelBundle) -> dict:
    """Return the part of the index for timm: the tag names the training data."""
    about = bundle.about()
    return {
        "tag": TAG,
        "input_size": [3, about["size"], about["size"]],
        "crop_pct": about["crop"],
        "interpolation": about["interpolation"],
        "mean": [round(value, 4) for value in about["mean"]],
        "std": [round(value, 4) for value in about["std"]],
        "label_names": about["classes"],
    }


def effect(run: Path, path: Path, root: Path) -> dict:
    """What packing does to the logits of some test photos."""
    names = (root / "annotations/test.txt").read_text().splitlines()
    names = [line.split()[0] for line in names if line and not line.startswith("#")]
    before, after = load(run), load(path)
    errors, same = [], []
    for name in names[:: max(len(names) // PHOTOS, 1)][:PHOTOS]:
        pixels = before.preprocess(read_image(root / "images" / f"{name}.jpg"))[None]
        with torch.no_grad():
            a, b = (m.model(m.normalise(pixels)) for m in (before, after))
        errors.append(float((a - b).norm() / a.norm()))
        same.append(float((a.argmax(1) == b.argmax(1)).float().mean()))
    return {
        "photos": len(errors),
        "logit_error": statistics.mean(errors),
        "same_class": 100 * statistics.mean(same),
    }


def figures(plan: Plan, values: dict) -> str:
    return ", ".join(f"{word} {values[key]:.2f}" for key, word in plan.columns.items())


def table(args: argparse.Namespace, task: str) -> str:
    """Ours and the peers, as evaluated at the end of training."""
    plan, rows = PLANS[task], [r for r in args.rows if r["task"] == task]
    lines = [
        f"| model | M parameters | seeds | {' | '.join(plan.columns.values())} | images/s |",
        "| --- " * (4 + len(plan.columns)) + "|",
    ]
    for model, key_ in dict.fromkeys((r["model"], r["key"]) for r in rows):
        mine = [r for r in rows if (r["model"], r["key"]) == (model, key_)]
        cells = [mean([r["val"][key] for r in mine]) for key in plan.columns]
        quiet = [r["images_per_s"] for r in speeds(mine)]
        cells.append(f"{statistics.median(quiet):.0f}" if quiet else "-")
        label = f"**{model}** (ours)" if model == OURS else model
        if args.hold_out:
            label += f" {shlex.join(mine[0]['settings'])}"
        size = f"{mine[0]['params'] / 1e6:.2f}"
        lines.append(f"| {label} | {size} | {len(mine)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(args: argparse.Namespace) -> None:
    """Write the rows and cards so far."""
    report = args.about | {"rows": args.rows}
    (args.out / "demo_weights.json").write_text(json.dumps(report, indent=1) + "\n")
    if not args.hold_out:
        for task, plan in PLANS.items():
            if zoo.find_file(plan.name, args.out):
                (args.out / f"{plan.name}.md").write_text(card(args, task))


DOES = {
    "classify": "Classifies 37 breeds of cats and dogs.",
    "segment": "Finds the pet, the background and the border between them, pixel by pixel.",
    "detect": "Finds cats and dogs: box, species, silhouette.",
}
USE = {
    "classify": "pale predict photo.jpg --weights {name}\n"
    "pale view attention photo.jpg --weights {name} -o look.html\npale export {name} -o pets.onnx\n"
    "pale weights export {name} DIR      # then: import pale; timm.create_model('local-dir:DIR', pretrained=True)",
    "segment": "pale predict photo.jpg --weights {name} -o out\npale export {name} -o pets.onnx",
    "detect": "pale predict photo.jpg --weights {name} -o out\npale export {name} -o pets.onnx",
}
LIMITS = {
    "classify": "It knows the 37 breeds and nothing else: a photo of anything gets one of their names. "
    "It is given the centre square of a photo.",
    "segment": "It knows photos with one cat or dog that fills much of the image; on others it is unreliable. "
    "The border class is the trimap's, a band of some pixels that annotators left undecided.",
    "detect": "Photos show one animal each, so it has never seen two that hide each other, nor an image without "
    "any. Silhouettes end where the trimap's border begins.",
}


def card(args: argparse.Namespace, task: str) -> str:
    """Return the model card, as the Hugging Face hub shows it."""
    plan = PLANS[task]
    entry = zoo.get_entry(plan.name, args.out)
    ours = next(r for r in args.rows if r["task"] == task and "packed" in r)
    recipe = read(args.out / entry.file)[1]
    facts = args.about["environment"]
    packing = ours["packing"]
    lost = ""
    if "logit_error" in packing:
        unit = "photos" if task == "classify" else "pixels"
        lost = (
            f" Packing moves the logits by {packing['logit_error']:.2%} of their norm and gives "
            f"{100 - packing['same_class']:.1f} % of the {unit} another class ({packing['photos']} photos)."
        )
    start, other = "from random weights", "no other data, no distillation"
    if ours["start"]:
        start = f"from the backbone of `{ours['start']}`"
    if args.start:
        other = f"of other data only what `{args.start}` was trained on, no distillation"
    peers = [r["model"] for r in args.rows if r["task"] == task and r["model"] != OURS]
    beside = (
        "Every model by the same recipe, evaluated at the end of training in the same way (before packing):"
        if peers
        else "No peer has been trained yet; ours at the end of training (before packing):"
    )
    speed = (
        f"{ours['images_per_s']:.0f} photos a second"
        if speeds([ours])
        else f"{ours['jobs']} runs at once"
    )
    commit = f", commit {facts['commit']}" if facts["commit"] else ""
    count = ours["packed"]["images"]
    kind = {"classify": "image-classification", "segment": "image-segmentation"}
    what = (
        f"{DOES[task]} The model is {OURS} of the [Pale Transformer](https://arxiv.org/abs/2112.14000), "
        f"{entry.params / 1e6:.2f} M parameters in {entry.bytes / 1e6:.2f} MB, trained on "
        f"{'' if args.start else 'nothing but '}the {args.photos} training photos of Oxford-IIIT Pet"
        + (f", starting from `{args.start}`." if args.start else ".")
    )
    good = (
        f"**{figures(plan, ours['packed'])}** (per cent): this file, unpacked, in float32, on {count:.0f} test "
        f"photos.{lost}"
    )
    made = (
        f"Recipe `{plan.recipe}`, seed 0, {ours['steps']} steps of {recipe.batch} photos, {start}; {other}. "
        "The weights are those of the last step; the test photos chose nothing."
    )
    limits = (
        f"{LIMITS[task]} Trained for minutes on few photos, it shows what the code does and is no product. How it "
        "treats animals, cameras and light that the photos do not show has not been tested."
    )
    licence = "The weights are ours, Apache-2.0."
    if args.start:
        licence = (
            f"The weights are ours, {entry.license.upper()}, as `{args.start}`, whose card lists the terms of the "
            "images it was trained on."
        )
    licence += " The photos are CC BY-SA 4.0 (Oxford-IIIT Pet) and not contained."
    earlier = ""
    if args.start:
        earlier = f"\nThe images that `{args.start}` was trained on, other cats and dogs among them, are on its card."
    toy = "**A toy run, to test the script: these weights are of no use.**\n\n" if args.toy else ""
    return f"""---
license: {entry.license}
library_name: {"timm" if task == "classify" else "pale-transformer"}
pipeline_tag: {kind.get(task, "object-detection")}
tags: [pale-transformer, vision, pets]
---

# {plan.name}

{toy}{paragraph(what)}

```bash
{USE[task].format(name=plan.name)}
pale eval {plan.name} --data.root oxford-iiit-pet
```
{in_timm(entry)}
## How good

{paragraph(good)}

{beside}

{table(args, task)}

With {count:.0f} photos the standard error of an accuracy is up to {50 / count**0.5:.1f} points, and seeds differ too.

## How it was made

{paragraph(made, "- ")}
- Again: `{entry.command}`, then `pale weights pack RUN -o {entry.file}`.
- On {facts["device"]}, torch {facts["torch"]}, timm {facts["timm"]}, pale {facts["pale"]}{commit}:
  {speed}.
- Stored as int8 with a scale for each output channel; norms and biases float32, depthwise kernels float16.
- sha256 `{entry.sha256}`

## Data

Oxford-IIIT Pet (Parkhi, Vedaldi, Zisserman, Jawahar, CVPR 2012), scaled to a short side of at most 160 pixels: its
official trainval list for training, {count:.0f} photos of its official test list (3669) for the figures above.{earlier}

## Limits

{paragraph(limits)}

## Licence

{paragraph(licence)}
"""


def in_timm(entry: zoo.ZooEntry) -> str:
    """Return how timm loads the weights, for the card."""
    if not entry.timm:
        return ""
    return f"""
```python
import pale, timm

model = timm.create_model("{entry.timm_name}", pretrained=True)
names = model.pretrained_cfg["label_names"]
```
"""


def paragraph(text: str, mark: str = "") -> str:
    return textwrap.fill(
        text,
        118,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def words_of(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runs", type=Path, default=Path("runs/demo_weights"))
    parser.add_argument(
        "--only", type=words_of, default=list(PLANS), help="classify,segment,detect"
    )
    parser.add_argument(
        "--peers", type=words_of, default=["convnext_zepto_rms"], help="timm models, or ''"
    )
    parser.add_argument("--seeds", type=int, default=1, help="seeds of our model; seed 0 is packed")
    parser.add_argument("--peer-seeds", type=int, default=1)
    parser.add_argument(
        "--hold-out", type=float, default=0.0, help="validate on this share of the training set"
    )
    for task in PLANS:
        parser.add_argument(f"--{task}", default="", metavar="SETTINGS", help="'--epochs 100'")
    parser.add_argument(
        "--independent",
        action="store_true",
        help="segmenter and detector start as the classifier does, not from its backbone",
    )
    parser.add_argument(
        "--workers", type=int, default=14, help="data loading processes of each run"
    )
    parser.add_argument("--start", default="", help="weights that the classifier starts from")
    add_jobs(parser)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop and save after this")
    parser.add_argument("--commit", help="commit to record if there is no git history")
    parser.add_argument("--toy", action="store_true", help="a few steps, to try the script")
    args = parser.parse_args()
    stoppable()
    if unknown := sorted(set(args.only) - set(PLANS)):
        parser.error(f"--only takes {', '.join(PLANS)}, got {unknown[0]}")
    args.about = about(args)
    if args.commit:
        args.about["environment"]["commit"] = args.commit
    root = args.data / "oxford-iiit-pet"
    args.photos = len(
        get(PLANS["classify"].recipe).override({"data.root": str(root)}).data.train_source(0)
    )
    args.deadline = time.monotonic() + 60 * args.minutes
    args.out.mkdir(parents=True, exist_ok=True)
    earlier = args.out / "demo_weights.json"
    args.failed = {}
    args.rows = json.loads(earlier.read_text())["rows"] if earlier.is_file() else []
    # Ours whole before the peers, peers before further seeds: when time runs out, the least is missing.
    plan = [
        (task, model, seed)
        for seed in range(max(args.seeds, args.peer_seeds))
        for model in [OURS, *args.peers]
        if seed < (args.seeds if model == OURS else args.peer_seeds)
        for task in PLANS
        if task in args.only
    ]
    if args.jobs > 1:
        ahead(args, plan)
    failed = []
    for task, model, seed in plan:
        try:
            row(args, task, model, seed)
        except StoppedError:
            print(f"stopped at {task}, {model}, seed {seed}: run it again to go on", flush=True)
            break
        except RuntimeError as error:  # the others may still do
            print(error, flush=True)
            failed.append(f"{task}, {model}, seed {seed}")
    write(args)
    for task in args.only:
        if any(r["task"] == task for r in args.rows):
            print(f"\n{task}\n{table(args, task)}")
    if failed:
        raise SystemExit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
