"""Parameters and multiply-adds of detectors: formulas against models, PyTorch's counter and the paper's tables."""

from collections import OrderedDict

import pytest
import torch
from tasks.detection.test_model import small
from torch.utils.flop_counter import FlopCounterMode

from pale.model import cost
from pale.recipes import RECIPES, get
from pale.recipes.kinds import Detection
from pale.tasks.detection.model import MaskRCNN, numbered

COCO = [n for n in RECIPES if n.startswith("coco.")]


def cost_of(recipe: Detection, size: tuple[int, int]) -> tuple[MaskRCNN, cost.Cost]:
    """Return the model of a recipe on the meta device, and the cost of backbone and heads by the formulas."""
    with torch.device("meta"):
        model = recipe.model.build(80, recipe.augment.short)
    heads, config = recipe.model.heads, model.body.backbone.model.config
    assert heads.mask_width == heads.width  # as the formulas have it
    widths = {"width": heads.width, "box_width": heads.box_width, "mask_layers": heads.mask_layers}
    body = cost.backbone(config, size, counting="paper")
    return model, body + cost.mask_rcnn(config, size, **widths)


@pytest.mark.parametrize("name", COCO)
def test_the_model_of_a_recipe_has_the_parameters_that_the_formulas_give(name):
    model, total = cost_of(get(name), (800, 1280))
    assert total.params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", [n for n in COCO if get(n).reported is not None])
def test_the_model_of_a_recipe_has_the_size_that_the_paper_reports(name):
    recipe = get(name)
    _, total = cost_of(recipe, (800, 1280))
    assert round(total.params / 1e6) == recipe.reported.params_m
    assert total.macs / 1e9 == pytest.approx(recipe.reported.macs_g, rel=0.02)


def test_all_recipes_except_two_state_the_figures_of_the_paper():
    ours = {n for n in COCO if get(n).reported is None}
    assert ours == {"coco.mask_rcnn_nano", "coco.overfit"}


@pytest.mark.parametrize("size", [(128, 160), (75, 133)], ids=["even", "odd"])
def test_the_cost_of_pyramid_and_heads_is_what_pytorchs_counter_counts(size):
    model = small().eval()
    images = torch.randn(1, 3, *size)
    with torch.no_grad():
        inside = model.body.backbone(images)
        inside = OrderedDict((str(i), y) for i, y in enumerate(inside))
        maps = list(model.body(images).values())
    regions = numbered([torch.tensor([[4.0, 4, 60, 70]]).repeat(7, 1)])
    with torch.no_grad():
        counted = {
            "body.": count_macs(lambda: model.body.fpn(inside)),
            "rpn.": count_macs(lambda: model.rpn.head(maps)),
            "box.": count_macs(lambda: model.roi_heads.classify(maps, regions)),
            "mask.": count_macs(lambda: model.roi_heads._masks(maps, regions[:5])),
        }
    config = model.body.backbone.model.config
    widths = {"num_classes": 3, "width": 16, "box_width": 16, "mask_layers": 1}
    bill = cost.mask_rcnn(config, size, **widths, boxes=7, masks=5)
    expected = {name: bill.under(name).macs for name in counted}
    assert sum(expected.values()) == bill.macs
    # Here the mask head is narrower than the pyramid, which the paper's is not.
    expected["mask."] = 5 * (196 * 16 * 8 * 9 + 196 * 4 * 8 * 8 + 784 * 8 * 4)
    assert counted == expected
    assert all(counted.values())


def count_macs(run) -> int:
    """Return the multiply-adds; PyTorch counts each as two operations."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2
