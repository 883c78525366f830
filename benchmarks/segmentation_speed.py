"""Speed of UperNet on Pale-T beside UperNet on timm's Swin-T, in turn in one process, on random data.

    python benchmarks/segmentation_speed.py --json OUT/segmentation_speed.json

A training step is forward, loss, backward and AdamW at the paper's crop and batch, bf16 autocast; inference is one
whole image of 512x2048 to logits at a quarter of it, bf16 autocast; eager, and compiled with --compiled.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch

from pale.bench import Setting, about, alternate, quartiles
from pale.recipes.schema import Segmentation
from pale.tasks.segmentation import SegmentationModel
from pale.tasks.segmentation.loss import Loss, pixel_loss

MODELS = {"pale_t": "pale_tiny", "swin_t": "swin_tiny_patch4_window7_224"}


def train_step(
    name: str, device: str, batch: int, crop: int, dtype: torch.dtype, width: int, compiled: bool
):
    model = (
        SegmentationModel(name=name, drop_path=0.3, width=width).build(150, crop).to(device).train()
    )
    network = torch.compile(model) if compiled else model
    cuda = device == "cuda"
    optim = Segmentation().optim
    optimizer = torch.optim.AdamW(
        model.parameters(), optim.lr, weight_decay=optim.weight_decay, fused=cuda or None
    )
    images = torch.randn(batch, 3, crop, crop, device=device)
    masks = torch.randint(0, 150, (batch, crop, crop), device=device).to(torch.uint8)

    def step() -> None:
        with torch.autocast(device, dtype):
            logits, auxiliary = network(images)
            loss = pixel_loss(logits, masks, Loss(), None) + 0.4 * pixel_loss(
                auxiliary, masks, Loss(), None
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def infer_step(
    name: str, device: str, size: tuple[int, int], dtype: torch.dtype, width: int, compiled: bool
):
    model = SegmentationModel(name=name, width=width).build(150, size).to(device).eval()
    network = torch.compile(model) if compiled else model
    images = torch.randn(1, 3, *size, device=device)

    def step() -> None:
        with torch.no_grad(), torch.autocast(device, dtype):
            network(images)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--crop", type=int, default=512)
    parser.add_argument("--size", type=int, nargs=2, default=(512, 2048))
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--compiled", action="store_true", help="compiled too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # as the training loop
    setting = Setting(tuple(args.size), args.device, "bf16", args.rounds)
    dtype, rows = torch.bfloat16, []
    for compiled in (False, True) if args.compiled else (False,):
        for task in ("training", "inference"):
            steps, peaks = {}, {}
            for label, name in MODELS.items():
                if args.device == "cuda":
                    torch.cuda.synchronize()
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                if task == "training":
                    steps[label] = train_step(
                        name, args.device, args.batch, args.crop, dtype, args.width, compiled
                    )
                else:
                    steps[label] = infer_step(
                        name, args.device, tuple(args.size), dtype, args.width, compiled
                    )
                for _ in range(5 if args.device == "cuda" else 1):
                    steps[label]()
                if args.device == "cuda":
                    torch.cuda.synchronize()
                    peaks[label] = (torch.cuda.max_memory_allocated() - held) / 2**20
            times = alternate(steps, setting)
            medians = {label: statistics.median(t) for label, t in times.items()}
            for label, t in times.items():
                count = args.batch if task == "training" else 1
                rows.append(
                    {
                        "task": task,
                        "mode": "compiled" if compiled else "eager",
                        "model": label,
                        "batch": count,
                        "ms": medians[label],
                        "quartiles": quartiles(t),
                        "images_per_s": 1e3 * count / medians[label],
                        "ours_over_it": medians[label] / medians["pale_t"],
                        "peak_mb": peaks.get(label),
                    }
                )
                print(rows[-1], flush=True)
            del steps
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"about": about(setting), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
