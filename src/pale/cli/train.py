"""Commands about training: `pale recipes`, `pale train`, `pale eval`, `pale report`."""

from __future__ import annotations

from typing import Literal

from ..core.progress import select_progress
from ..errors import SettingsError
from ..train.settings import EvalSettings, ReportSettings, RunSettings
from .console import print_json, print_line
from .options import Reporting, argument, option


class Recipes(Reporting, name="recipes"):
    """List the recipes, or show one.

    Examples:
        pale recipes
        pale recipes --all
        pale recipes show small_data.pale_t
    """

    show: Literal["show"] | None = argument("show one recipe as YAML")
    name: str | None = argument("recipe name, such as imagenet.pale_t")
    all: bool = option("list all recipes, with variants and the ablations of the paper")

    def run(self) -> None:
        """Print one recipe or all."""
        from .. import recipes
        from ..recipes.files import recipe_to_yaml
        from ..tools.tables import describe_recipes

        if self.show and not self.name:
            raise SettingsError("show needs the name of a recipe; `pale recipes` lists all")
        if self.name:
            recipe = recipes.get(self.name)
            self.report(recipe.plain(), recipe_to_yaml(recipe).splitlines())
            return
        listed = recipes.RECIPES if self.all or self.json else recipes.FIRST
        found = {name: recipes.get(name) for name in listed}
        hint = "pale recipes show NAME prints one; pale train NAME --data.root DIR trains with it."
        if rest := len(recipes.RECIPES) - len(found):
            hint += f" {rest} more, with the paper's ablations: pale recipes --all."
        self.report(
            {name: recipe.about for name, recipe in found.items()}, describe_recipes(found), hint
        )


class Train(Reporting, RunSettings, name="train", settings=""):
    """Train with a recipe, or resume a run.

    Every setting of a recipe is an option too: --data.root DIR --optim.lr 1e-3 --epochs 10. `pale recipes show
    RECIPE` prints them all.

    Examples:
        pale train quickstart
        pale train finetune --data.root photos
        pale train small_data.pale_t --data.root DIR --output runs/mine
        pale train --resume runs/mine
        torchrun --nproc-per-node 8 -m pale train imagenet.pale_t --data.root DIR
    """

    def run(self) -> int:
        """Train; return 128 + the number of the signal that stopped it, or 0."""
        from ..train.command import run_training

        return run_training(self, self.overrides, print_json if self.json else None)


class Eval(Reporting, EvalSettings, name="eval", settings=""):
    """Evaluate a run or weights on the validation set.

    Settings of the recipe are options too.

    Examples:
        pale eval runs/mine
        pale eval runs/mine --data.root OTHER --data.size 384
    """

    def run(self) -> None:
        """Evaluate and print."""
        from ..recipes.stored import stored_recipe, without_start
        from ..train.distributed import join
        from ..train.evaluate import evaluate_weights
        from ..weights.read import load_weights

        weights = load_weights(self.weights)
        recipe = without_start(stored_recipe(weights.about, self.weights, self.recipe))
        recipe = recipe.override(self.overrides)
        found = []
        with join(self.device) as world:
            results = evaluate_weights(
                recipe,
                weights,
                self.weights,
                world,
                protocol=self.protocol,
                batch=recipe.task_class.evaluation_batch(self.batch_size),
                track=select_progress(self.json, world.main),
            )
            for each in results:
                found.append(each)
                if world.main and not self.json:
                    print_line(each.task.summary(each))
            if not world.main:
                return
        task = found[0].task
        folder = self.output or (self.weights / "evaluation" if self.weights.is_dir() else None)
        written = task.write_evaluation(found, folder) if folder is not None else ""
        line = [f"{folder} written: {written}"] if written else []
        self.report(task.as_json(found), task.tables(found), line)


class Report(Reporting, ReportSettings, name="report"):
    """Write report.html of a run, finished or not, or a page that compares several runs."""

    def run(self) -> None:
        """Write the page."""
        from ..train.report import write_pages

        path = write_pages(self.runs, self.output)
        self.report({"report": str(path)}, f"{path} written")
