"""Recipes of the kill test, and the results of killer.py for one of them."""

import json
import subprocess
import sys
from pathlib import Path

from support.recipes import classification_recipe, detection_recipe, segmentation_recipe

from pale.recipes.files import recipe_to_yaml
from pale.recipes.schema import Recipe

SAVING = {"ema": 0.9, "saving.every_steps": 3}


def recipes() -> dict[str, Recipe]:
    """Return a small recipe per task with all features on: 15 steps, evaluations, a checkpoint every third step."""
    return {
        "classification": classification_recipe(epochs=6, eval_every=3).override(SAVING),
        "segmentation": segmentation_recipe(steps=15, eval_every=2).override(SAVING),
        "detection": detection_recipe(steps=13, eval_every=1).override(SAVING),
    }


def kill(folder: Path, task: str, *options: object) -> tuple[list[dict], list[dict]]:
    """Return the kills, and the comparisons with the run that was not killed."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(recipes()[task]))
    script = Path(__file__).with_name("killer.py")
    words = [sys.executable, script, folder / "runs", recipe, *options]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    sys.stdout.write(done.stdout)  # seeds and times, shown on failure
    assert done.returncode == 0, done.stderr[-3000:]
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    kills = [entry for entry in entries if "way" in entry]
    return kills, [entry for entry in entries if "compared" in entry]
