"""Train each task twice and compare every tensor of the last checkpoints, bit for bit.

This is a separate process, as cuBLAS reads its setting when CUDA is first used. Arguments: folder, device, and settings
of the recipes. Prints one JSON line for each task: names of tensors that differ, and how many were compared.
"""

import json
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.recipes import classification_recipe, detection_recipe, segmentation_recipe

from pale.recipes.schema import Recipe
from pale.train.distributed import World
from pale.train.loop import train

# On a GPU, maps and batches so large that sums by atomic operations differ nearly every time.
GPU = {"model.options": {}, "batch": 16}
SIZES = {
    "classification": {"data.size": 96, "data.samples": 64},
    "segmentation": {"data.size": 128, "augment.crop": 128, "data.samples": 64},
    "detection": {"data.size": 160, "data.samples": 64, "data.objects": [2, 4]},
}
HEADS = {
    "model.heads.width": 64,
    "model.heads.proposals": 200,
    "model.heads.rpn_samples": 128,
    "model.heads.box_samples": 64,
}


def recipes(device: str, settings: dict) -> dict[str, Recipe]:
    found = {
        "classification": classification_recipe(epochs=2),
        "segmentation": segmentation_recipe(),
        "detection": detection_recipe(),
    }
    for name, recipe in found.items():
        if device == "cuda":
            own = GPU | SIZES[name] | (HEADS if name == "detection" else {})
            recipe = recipe.override(own)
        found[name] = recipe.override(settings)
    return found


def tensors(run: Path) -> dict[str, torch.Tensor]:
    path = max((run / "checkpoints").glob("step_*"))
    found = {}
    for file in path.glob("*.safetensors"):
        found |= {f"{file.stem}.{name}": value for name, value in load_file(file).items()}
    trainer = torch.load(path / "trainer.pt", weights_only=True)
    for i, values in trainer["optimizer"]["state"].items():
        found |= {f"optimizer.{i}.{name}": value for name, value in values.items()}
    return found


def main(folder: Path, device: str, settings: dict) -> None:
    for name, recipe in recipes(device, settings).items():
        for run in ("a", "b"):
            torch.manual_seed(ord(run))
            train(recipe, folder / name / run, World(torch.device(device)), quiet=True)
        one, two = (tensors(folder / name / run) for run in ("a", "b"))
        assert one.keys() == two.keys()
        bits = torch.uint8
        differ = [n for n, x in one.items() if not torch.equal(_bits(x, bits), _bits(two[n], bits))]
        result = {"task": name, "compared": len(one), "differ": len(differ), "first": differ[:5]}
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()


def _bits(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(kind)


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[3:])
    main(Path(sys.argv[1]), sys.argv[2], {k: yaml.safe_load(v) for k, v in given.items()})
