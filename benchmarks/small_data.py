"""Classification from scratch on small sets: Pale-T beside timm models by the same recipe.

    python benchmarks/small_data.py DATA OUT                       # three seeds for ours, one for the peers
    python benchmarks/small_data.py DATA OUT --jobs 3 --workers 5  # on a large GPU, three runs at once
    python benchmarks/small_data.py DATA OUT --hold-out 0.1 --only tiny --models pale_t   # to choose settings

DATA holds tiny-imagenet-50/ and oxford-iiit-pet/. Finished runs are not repeated and interrupted ones
resume. With --hold-out, validation uses a share of the training images, and the val images are not read.

"tokens" is tiny-imagenet-50 again, with MixToken, and with MixToken and the token labels of a teacher: the first seed
of "tiny", trained here.
"""

import argparse
import json
import shlex
from pathlib import Path

from common import alone, arguments, curves, made, mean, pale, speeds, summary, trained, write

MODELS = {
    "pale_t": "pale_tiny",
    "swin_t": "swin_tiny_patch4_window7_224",
    "convnext_t": "convnext_tiny",
    "resnet50": "resnet50",
}
TOKENS = {
    "pale_t mixtoken": [
        "small_data.pale_t",
        "--mix.mixup",
        0,
        "--mix.cutmix",
        0,
        "--mix.tokens",
        1,
    ],
    "pale_t mixtoken, token labels": ["small_data.pale_t_star"],
}
PLANS = {"tiny": list(MODELS), "pets": ["pale_t", "swin_t", "convnext_t"], "tokens": list(TOKENS)}


def classify(args: argparse.Namespace, task: str, label: str, seed: int) -> dict:
    words: list[object] = list(TOKENS.get(label, ["small_data.pale_t"]))
    words += ["--model.name", MODELS.get(label, "pale_tiny"), "--seed", seed]
    if label == "swin_t":
        size = args.pets_size if task == "pets" else 128
        words += ["--model.options", json.dumps({"img_size": size})]
    if words[0] == "small_data.pale_t_star":
        words += ["--token_labels.store", token_labels(args)]
    if task == "pets":
        words += ["--data.kind", "pets", "--data.root", args.data / "oxford-iiit-pet"]
        words += ["--data.train", "trainval", "--data.val", "test"]
        words += ["--data.size", args.pets_size, "--epochs", args.pets_epochs]
        words += ["--batch", 256, "--warmup_epochs", 10]
    else:
        words += ["--data.root", args.data / "tiny-imagenet-50"]
    words += ["--data.workers", args.workers, "--eval_every", 20, "--data.on_device=pictures"]
    if args.hold_out:
        words += ["--data.hold_out", args.hold_out]
    words += shlex.split(args.settings)
    name = f"{task}_{label}_{seed}".replace(", ", "_").replace(" ", "_")
    run = trained(args.out / name, *words, jobs=args.jobs)
    return {"task": task, "model": label, "seed": seed} | summary(run)


def token_labels(args: argparse.Namespace) -> Path:
    """Return the token labels of the first run."""
    teacher = args.out / classify(args, "tiny", "pale_t", 0)["run"]
    store = args.out / "token_labels"
    with alone(store):
        root, part = args.data / "tiny-imagenet-50", ["--data.hold_out", args.hold_out]
        pale(
            *("token-labels", "make", "--model", teacher, "--output", store, "--data.root", root),
            *(part if args.hold_out else []),
            run=store,
            jobs=args.jobs,
        )
    return store


def table(rows: list[dict]) -> str:
    lines = [
        "| | model | seeds | top-1 | top-5 | images/s | waiting for data |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for task in PLANS:
        for label in PLANS[task]:
            if not (mine := [r for r in rows if r["task"] == task and r["model"] == label]):
                continue
            cells = [mean([r["val"][name] for r in mine]) for name in ("top1", "top5")]
            if quiet := speeds(mine):
                cells += [f"{quiet[0]['images_per_s']:.0f}", f"{quiet[0]['data_wait']:.0%}"]
            else:
                cells += ["-", "-"]
            lines.append(f"| {task} | {label} | {len(mine)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PLANS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=int, default=3, help="seeds of our model")
    parser.add_argument("--peer-seeds", type=int, default=1)
    parser.add_argument("--pets-size", type=int, default=160)
    parser.add_argument("--pets-epochs", type=int, default=100)
    parser.add_argument("--hold-out", type=float, default=0.0)
    parser.add_argument("--settings", default="", help="settings of all runs: '--cuda_graph true'")
    args = parser.parse_args()
    # Peers before further seeds: if time runs out, only seeds are missing.
    plan = [
        (task, label, seed)
        for seed in range(max(args.seeds, args.peer_seeds))
        for task, labels in PLANS.items()
        for label in labels
        if seed < (args.seeds if label == "pale_t" else args.peer_seeds)
        and (label in args.models or task == "tokens")
        and args.only in (None, task)
    ]
    args.out.mkdir(parents=True, exist_ok=True)

    def report(rows: list[dict]) -> str:
        write(args.out, "small_data", args, rows, text := table(rows))
        curves(args.out, rows, args.out / "small_data.png")
        return text

    made(args, plan, classify, report)


if __name__ == "__main__":
    main()
