"""Speed of Mask R-CNN on Pale-T beside the same on timm's Swin-T and torchvision's own on ResNet-50, in one process.

    python benchmarks/detection_speed.py --json OUT/detection_speed.json

On random images of 800x1280 with ten random objects each. A training step is forward, losses, backward and AdamW
at `--batch` images under bf16 autocast; inference is one image to 28x28 masks (torchvision's pastes them, as it
always does), bf16 autocast. With --mode compiled, backbone and pyramid are compiled; with graphs they are recorded, as
`pale train --cuda_graph true` has it in training, and in inference `pale.optimize(model, cuda_graph=True)`, of which
the peers get the graph and the 16 bits.
"""

import argparse

import torch
from common import compare_speeds, speed_arguments
from torchvision.models.detection import maskrcnn_resnet50_fpn
from torchvision.models.detection.image_list import ImageList

import pale
from pale.optimize import Graphed, Part
from pale.recipes.schema import Detection
from pale.tasks.detection import DetectionModel
from pale.tasks.detection.mask_rcnn import DYNAMIC
from pale.train.graphed import record_part

MODELS = {"pale_t": "pale_tiny", "swin_t": "swin_tiny_patch4_window7_224", "resnet50": None}
MODES = ("eager", "compiled", "graphs")
OBJECTS = 10


def build(label: str, size: tuple[int, int], device: str):
    name = MODELS[label]
    if name is None:
        model = maskrcnn_resnet50_fpn(
            weights=None,
            weights_backbone=None,
            num_classes=81,
            min_size=min(size),
            max_size=max(size),
        )
        return model.to(device)
    return DetectionModel(name=name, drop_path=0.2).build(80, size).to(device)


def inputs(label: str, batch: int, size: tuple[int, int], device: str):
    h, w = size
    generator = torch.Generator().manual_seed(0)
    targets = []
    for i in range(batch):
        corner = torch.rand(OBJECTS, 2, generator=generator) * torch.tensor([w * 0.7, h * 0.7])
        sides = 20 + torch.rand(OBJECTS, 2, generator=generator) * torch.tensor(
            [w * 0.25, h * 0.25]
        )
        boxes = torch.cat([corner, corner + sides], 1)
        masks = torch.zeros(OBJECTS, h, w, dtype=torch.uint8)
        for mask, (a, b, c, d) in zip(masks, boxes.int().tolist(), strict=True):
            mask[b:d, a:c] = 1
        labels = torch.randint(1, 81, (OBJECTS,), generator=generator)
        target = {"boxes": boxes, "labels": labels, "masks": masks}
        targets.append(
            {k: v.to(device) for k, v in target.items()} | ({"seed": i} if MODELS[label] else {})
        )
    images = torch.rand(batch, 3, h, w, generator=generator).to(device)
    if MODELS[label] is None:
        return list(images), targets
    return ImageList(images, [size] * batch), targets


def step_of(label: str, task: str, args: argparse.Namespace, mode: str):
    size = tuple(args.size)
    model = build(label, size, args.device)
    images, targets = inputs(label, args.batch if task == "training" else 1, size, args.device)
    body = "body" if MODELS[label] else "backbone"
    if mode == "compiled":
        getattr(model, body).compile(dynamic=True, options=DYNAMIC)
    if task == "inference":
        model.eval()
        if mode == "graphs" and label == "pale_t":
            model = pale.optimize(model, cuda_graph=True)
        elif mode == "graphs":
            part = Graphed(getattr(model, body).to(torch.bfloat16))
            setattr(model, body, Part(part, torch.bfloat16))

        def infer() -> None:
            with torch.no_grad(), torch.autocast(args.device, torch.bfloat16):
                model(images)

        return infer
    model.train()
    if mode == "graphs":
        example = torch.zeros(args.batch, 3, *size, device=args.device)
        record_part(getattr(model, body), example, torch.bfloat16)
    optim = Detection().optim
    optimizer = torch.optim.AdamW(
        model.parameters(),
        optim.lr,
        weight_decay=optim.weight_decay,
        fused=args.device == "cuda" or None,
    )

    def train() -> None:
        with torch.autocast(args.device, torch.bfloat16):
            loss = sum(model(images, targets).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def main() -> None:
    parser = speed_arguments(__doc__, 8, (800, 1280))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--mode", nargs="+", default=["eager"], choices=MODES)
    args = parser.parse_args()

    def make(label: str, task: str, mode: str):
        return step_of(label, task, args, mode)

    compare_speeds(args, args.models, make)


if __name__ == "__main__":
    main()
