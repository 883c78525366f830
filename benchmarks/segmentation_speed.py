"""Speed of UperNet on Pale-T beside UperNet on timm's Swin-T, in turn in one process, on random data.

    python benchmarks/segmentation_speed.py --json OUT/segmentation_speed.json

A training step is forward, loss, backward and AdamW at the paper's crop and batch, bf16 autocast; inference is one
whole image of 512x2048 to logits at a quarter of it. By --mode eager, compiled, or as a CUDA graph, as `pale train
--cuda_graph true` has it; in inference ours goes through `pale.optimize` and the peer is in bf16 whole.
"""

import argparse

import torch
from common import compare_speeds, speed_arguments

import pale
from pale.bench import graphed
from pale.recipes.schema import Segmentation
from pale.tasks.segmentation import SegmentationModel
from pale.tasks.segmentation.loss import Loss, pixel_loss
from pale.train.graphed import GraphedStep

MODELS = {"pale_t": "pale_tiny", "swin_t": "swin_tiny_patch4_window7_224"}


MODES = ("eager", "compiled", "graphs")


def train_step(name: str, mode: str, args: argparse.Namespace):
    device, crop = args.device, args.crop
    model = SegmentationModel(name=name, drop_path=0.3, width=args.width).build(150, crop)
    model = model.to(device).train()
    network = torch.compile(model) if mode == "compiled" else model
    optim = Segmentation().optim
    optimizer = torch.optim.AdamW(
        model.parameters(), optim.lr, weight_decay=optim.weight_decay, fused=True
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

    if mode == "graphs":
        compute = recorded = GraphedStep(compute, model, batch)

    def step() -> None:
        compute(batch)
        optimizer.step()
        if mode == "graphs":
            recorded.zero_grad()
        else:
            optimizer.zero_grad()

    return step


def infer_step(name: str, mode: str, args: argparse.Namespace):
    size, dtype = tuple(args.size), torch.bfloat16
    model = SegmentationModel(name=name, width=args.width).build(150, size).to(args.device).eval()
    images = torch.randn(1, 3, *size, device=args.device)
    if mode == "graphs":
        ours = name.startswith("pale")
        model = pale.optimize(model, dtype) if ours else model.to(dtype)
        images = images.to(dtype)
    network = torch.compile(model) if mode == "compiled" else model

    def step() -> None:
        with torch.no_grad(), torch.autocast(args.device, dtype, enabled=mode != "graphs"):
            network(images)

    if mode == "graphs":
        with torch.no_grad():
            return graphed(step)
    return step


def main() -> None:
    parser = speed_arguments(__doc__, 16, (512, 2048))
    parser.add_argument("--crop", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--mode", nargs="+", default=["eager"], choices=MODES)
    args = parser.parse_args()

    def make(label: str, task: str, mode: str):
        return (train_step if task == "training" else infer_step)(MODELS[label], mode, args)

    compare_speeds(args, list(MODELS), make)


if __name__ == "__main__":
    main()
