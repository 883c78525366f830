"""The recipes without a dataset, trained by the command, reach results far above chance.

Each docstring states the measured result and that of chance.
"""

import json
from pathlib import Path

import pytest
import torch

from pale.cli.main import main
from pale.predict.bundle import load
from pale.recipes import get
from pale.train.distributed import World
from pale.train.evaluate import Evaluation

CPU = World(torch.device("cpu"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def trained(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    """Return the figures of `pale eval` after `pale train`."""
    assert main(["train", *words, "--device", "cpu", "--output", str(run)]) == 0
    capsys.readouterr()
    assert main(["eval", str(run), "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def with_random_classes(run: Path, name: str) -> dict[str, float]:
    """Return the figures of a detector with its boxes and masks, but random classes."""
    bundle = load(run)
    generator = torch.Generator().manual_seed(1)

    def rename(module, args, found):
        for each in found:
            labels = each["labels"]
            each["labels"] = torch.randint(
                1, len(bundle.classes) + 1, labels.shape, generator=generator
            )
        return found

    bundle.model.register_forward_hook(rename)
    figures, _ = Evaluation(get(name).task(), CPU, 16, 0).run(bundle.model, None)
    return figures


def test_quickstart_detection_learns_to_find_name_and_outline_shapes(tmp_path, capsys):
    """On validation scenes. Seed 0: box AP50 99.5, mask AP50 98.4; with random classes 23.9 and 23.6."""
    task = get("quickstart.detection").task()
    before, _ = Evaluation(task, CPU, 16, 0).run(task.model(), None)
    assert max(before["box_ap50"], before["mask_ap50"]) < 2
    found = trained(tmp_path / "run", capsys, "quickstart.detection")
    random = with_random_classes(tmp_path / "run", "quickstart.detection")
    for figure in ("box_ap50", "mask_ap50"):
        assert 10 < random[figure] < 45, random  # one of three names is right
        assert found[figure] > 80, found


def test_quickstart_segmentation_learns_to_find_and_name_shapes(tmp_path, capsys):
    """On validation scenes. The documentation states 87.5 mIoU; predicting background only gives less than 11.

    With the right shapes and random classes it is about 16. A third of the steps gave 31.
    """
    found = trained(tmp_path / "run", capsys, "quickstart.segmentation")
    assert found.get("single", found)["miou"] > 60, found
