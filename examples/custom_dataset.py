"""Train on a custom dataset: image files and a CSV file with their labels, here generated in a temporary folder.

python examples/custom_dataset.py
"""

import csv
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from torch.utils.data import DataLoader, Dataset

import pale

COLOURS = {"red": (210, 60, 50), "blue": (50, 80, 200)}


class CsvDataset(Dataset):
    """Samples from a CSV file with the columns `file` and `label`; paths are relative to it."""

    def __init__(self, path, transform):
        self.rows = list(csv.DictReader(Path(path).read_text().splitlines()))
        self.folder, self.transform = Path(path).parent, transform
        self.classes = sorted({row["label"] for row in self.rows})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        image = Image.open(self.folder / row["file"]).convert("RGB")
        return self.transform(image), self.classes.index(row["label"])


def main(folder):
    """Write a dataset, train on it and return the predicted class of its first image."""
    lines = ["file,label"]
    for number, label in enumerate([*COLOURS] * 8):
        Image.new("RGB", (50, 40), COLOURS[label]).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(lines))

    torch.manual_seed(0)
    data = CsvDataset(folder / "labels.csv", create_transform((3, 32, 32), crop_pct=1.0))
    model = pale.create_model("pale_nano", num_classes=len(data.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for images, labels in DataLoader(data, batch_size=4, shuffle=True):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return data.classes[model.eval()(data[0][0][None]).argmax()]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        print(main(Path(temporary)))
