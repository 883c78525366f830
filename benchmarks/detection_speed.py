"""Speed of Mask R-CNN on Pale-T beside the same on timm's Swin-T and torchvision's own on ResNet-50, in one process.

    python benchmarks/detection_speed.py --json OUT/detection_speed.json

On random images of 800x1280 with ten random objects each. A training step is forward, losses, backward and AdamW
at `--batch` images under bf16 autocast; inference is one image to 28x28 masks (torchvision's pastes them into the
image), bf16 autocast. Backbone and pyramid are what is compiled and recorded, for all models: in training as `pale
train --cuda_graph true` records them, in inference as `pale.optimize(model, cuda_graph=True)`, of which the peers get
the graph and the 16 bits. Modes: speeds.py.
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
from torchvision.models.detection import maskrcnn_resnet50_fpn
from torchvision.models.detection.image_list import ImageList

import pale
from pale.model.optimize import Graphed, Part
from pale.model.pale_transformer import PaleTransformer
from pale.recipes.kinds import Detection
from pale.tasks.detection.model import DetectionModel
from pale.train.graphed import record_part

MODELS = {"pale_t": "pale_tiny", "swin_t": "swin_tiny_patch4_window7_224", "resnet50": None}
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


def ready(model, body: str, mode: str, device: str):
    """Return a detector for inference, its backbone and pyramid compiled or recorded according to the mode."""
    if not mode.endswith("graphs"):
        if is_compiled(mode):
            setattr(model, body, Compiled(getattr(model, body)))
        return model
    ours = any(isinstance(module, PaleTransformer) for module in model.modules())
    if ours:
        model = pale.optimize(model)
        part = getattr(model, body).part
    else:
        part = getattr(model, body).to(torch.bfloat16)
    if is_compiled(mode):
        part = compiled_around(part) if ours else Compiled(part)
    if is_recorded(mode, device):
        part = Graphed(part)
    setattr(model, body, Part(part, torch.bfloat16))
    return model


def step_of(label: str, task: str, args: argparse.Namespace, mode: str):
    size = tuple(args.size)
    model = build(label, size, args.device)
    images, targets = inputs(label, args.batch if task == "training" else 1, size, args.device)
    body = "body" if MODELS[label] else "backbone"
    if task == "inference":
        model = ready(model.eval(), body, mode, args.device)

        def infer() -> None:
            with torch.no_grad(), torch.autocast(args.device, torch.bfloat16):
                model(images)

        return infer
    model.train()
    if is_compiled(mode):
        setattr(model, body, Compiled(getattr(model, body)).train())
    if is_recorded(mode, args.device):
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
    args = parser.parse_args()

    def make(label: str, task: str, mode: str):
        return step_of(label, task, args, mode)

    compare_speeds(args, args.models, make)


if __name__ == "__main__":
    main()
