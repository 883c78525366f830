"""Speed of UperNet on Pale-T beside UperNet on timm's Swin-T, in turn in one process, on random data.

    python benchmarks/segmentation_speed.py --json OUT/segmentation_speed.json

A training step is forward, loss, backward and AdamW at the paper's crop and batch, bf16 autocast; as a graph it is
recorded whole, as `pale train --cuda_graph true` does it. Inference is one whole image of 512x2048 to logits at a
quarter of it; in the modes with graphs ours goes through `pale.optimize` and the peer is in bf16 whole.
Modes: speeds.py.
"""

import argparse

import torch
from speeds import (
    Compiled,
    compare_speeds,
    compiled_around,
    is_compiled,
    is_recorded,
    speed_arguments,
)

import pale
from pale.bench.timing import record_cuda_graph
from pale.recipes.kinds import Segmentation
from pale.tasks.segmentation.loss import Loss, pixel_loss
from pale.tasks.segmentation.model import SegmentationModel
from pale.train.graphed import GraphedStep

MODELS = {"pale_t": "pale_tiny", "swin_t": "swin_tiny_patch4_window7_224"}


def train_step(name: str, mode: str, args: argparse.Namespace):
    device, crop = args.device, args.crop
    model = SegmentationModel(name=name, drop_path=0.3, width=args.width).build(150, crop)
    model = model.to(device).train()
    network = Compiled(model) if is_compiled(mode) else model
    optim = Segmentation().optim
    optimizer = torch.optim.AdamW(
        model.parameters(),
        optim.lr,
        weight_decay=optim.weight_decay,
        fused=device == "cuda" or None,
    )
    batch = {
        "images": torch.randn(args.batch, 3, crop, crop, device=device),
        "masks": torch.randint(0, 150, (args.batch, crop, crop), device=device).to(torch.uint8),
    }

    def compute(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits, auxiliary = network(batch["images"])
            loss = pixel_loss(logits, batch["masks"], Loss(), None)
            loss = loss + 0.4 * pixel_loss(auxiliary, batch["masks"], Loss(), None)
        loss.backward()
        return loss.detach()

    if not is_recorded(mode, device):

        def step() -> None:
            compute(batch)
            optimizer.step()
            optimizer.zero_grad()

        return step

    recorded = GraphedStep(compute, model, batch)

    def replay() -> None:
        recorded(batch)
        optimizer.step()
        recorded.zero_grad()

    return replay


def infer_step(name: str, mode: str, args: argparse.Namespace):
    size, dtype = tuple(args.size), torch.bfloat16
    model = SegmentationModel(name=name, width=args.width).build(150, size).to(args.device).eval()
    images = torch.randn(1, 3, *size, device=args.device)
    ours, graphs = name.startswith("pale"), mode.endswith("graphs")
    if graphs:
        model = pale.optimize(model, dtype) if ours else model.to(dtype)
        images = images.to(dtype)
    if is_compiled(mode):
        model = compiled_around(model) if graphs and ours else Compiled(model)

    def step() -> None:
        with torch.no_grad(), torch.autocast(args.device, dtype, enabled=not graphs):
            model(images)

    return record_cuda_graph(step) if is_recorded(mode, args.device) else step


def main() -> None:
    parser = speed_arguments(__doc__, 16, (512, 2048))
    parser.add_argument("--crop", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    args = parser.parse_args()

    def make(label: str, task: str, mode: str):
        return (train_step if task == "training" else infer_step)(MODELS[label], mode, args)

    compare_speeds(args, list(MODELS), make)


if __name__ == "__main__":
    main()
