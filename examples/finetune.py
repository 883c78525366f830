"""Fine-tune a Pale model in plain PyTorch. The data is generated; a CPU is enough.

pale weights export classify_pets pets    # the included pet classifier as a folder for timm
python examples/finetune.py pets          # without a folder: from random weights
"""

import sys

import timm
import torch
import torch.nn.functional as F

import pale  # noqa: F401  registers the models with timm

CLASSES = ("horizontal", "vertical")


def make_batch(size, generator):
    """Return noisy images of stripes, (size, 3, 32, 32), and their labels, (size,)."""
    labels = torch.randint(len(CLASSES), (size,), generator=generator)
    phase = 6.3 * torch.rand(size, 1, generator=generator)
    stripes = torch.sin(torch.arange(32) / 2 + phase)  # (size, 32)
    rows, columns = stripes[:, :, None].expand(-1, -1, 32), stripes[:, None].expand(-1, 32, -1)
    images = torch.where(labels[:, None, None] == 0, rows, columns)[:, None].expand(-1, 3, -1, -1)
    return images + 0.5 * torch.randn(size, 3, 32, 32, generator=generator), labels


def main(folder=None, steps=16):
    """Train for some steps and return the accuracy on new images."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    name = f"local-dir:{folder}" if folder else "pale_nano"
    # timm loads the backbone and replaces the classifier, because the number of classes differs.
    model = timm.create_model(name, pretrained=folder is not None, num_classes=len(CLASSES))
    head = list(model.get_classifier().parameters())
    backbone = [p for n, p in model.named_parameters() if not n.startswith("head.fc")]
    optimizer = torch.optim.AdamW(
        [{"params": backbone, "lr": 2e-4}, {"params": head, "lr": 2e-3}], weight_decay=0.05
    )
    model.train()
    for step in range(steps):
        images, labels = make_batch(8, generator)
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    model.eval()
    images, labels = make_batch(64, generator)
    with torch.inference_mode():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    print(f"accuracy {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    main(*sys.argv[1:2])
