import pytest
import timm
import torch
import yaml

from pale.model import cost
from pale.recipes import RECIPES, get
from pale.recipes.files import parse_recipe, read_recipe, recipe_to_yaml

PAPER = [name for name in RECIPES if name.startswith(("imagenet", "ablations"))]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_its_file_and_has_a_description(tmp_path, name):
    recipe = get(name)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe_to_yaml(recipe))
    assert read_recipe(path) == recipe
    assert recipe.name == name
    assert recipe.about.endswith(".")


@pytest.mark.parametrize("name", PAPER)
def test_the_model_of_a_recipe_has_the_size_that_the_paper_reports(name):
    recipe = get(name)
    with torch.device("meta"):
        model = recipe.model.build(1000, 224)
    params = sum(p.numel() for p in model.parameters()) / 1e6
    # APE's maps are beside the 22 M of the table.
    assert params == pytest.approx(recipe.reported.params_m, rel=0.04)
    macs = cost.count(model.config, (224, 224), counting="paper").macs / 1e9
    assert macs == pytest.approx(recipe.reported.macs_g, rel=0.02)


def test_imagenet_holds_every_value_of_the_papers_appendix():
    tiny, small, base = (get(f"imagenet.pale_{size}") for size in "tsb")
    for recipe in (tiny, small, base):
        assert (recipe.epochs, recipe.batch, recipe.warmup_epochs) == (300, 1024, 20)
        assert (recipe.optim.lr, recipe.optim.weight_decay) == (1e-3, 0.05)
        assert (recipe.data.size, recipe.data.crop) == (224, 0.875)
        assert recipe.ema is None
        assert recipe.augment.flip == 0.5
        assert (recipe.mix.mixup, recipe.mix.cutmix, recipe.mix.smoothing) == (0.8, 1.0, 0.1)
    assert [r.model.drop_path for r in (tiny, small, base)] == [0.1, 0.3, 0.5]
    assert [r.reported.top1 for r in (tiny, small, base)] == [83.4, 84.3, 84.9]


def test_starred_recipes_add_mixtoken_and_token_labels_alone():
    for size, top1 in (("t", 84.2), ("s", 85.0), ("b", 85.8)):
        plain, star = get(f"imagenet.pale_{size}"), get(f"imagenet.pale_{size}_star")
        assert star.reported.top1 == top1
        assert (star.mix.mixup, star.mix.cutmix, star.mix.tokens) == (0, 0, 1)
        assert star.token_labels.weight == 0.5
        changed = {"mix", "required", "reported", "name", "about"}
        for field in set(type(star).model_fields) - changed:
            assert getattr(star, field) == getattr(plain, field), field
    for name in ("imagenet.pale_t_star", "small_data.pale_t_star"):
        with pytest.raises(
            ValueError, match=r"needs token_labels\.store; .* pale token-labels make"
        ):
            get(name).override({"data.kind": "scenes"}).task()


def test_ablations_differ_from_pale_t_in_one_thing_alone():
    base = get("imagenet.pale_t")
    for name in RECIPES:
        if name.startswith("ablations."):
            row = get(name)
            changed = {
                field
                for field in type(base.model).model_fields
                if getattr(row.model, field) != getattr(base.model, field)
            }
            assert len(changed) <= 1, name
            same = {"model": base.model, "reported": base.reported, "name": "", "about": ""}
            assert row.model_copy(update=same) == base.model_copy(update={"name": "", "about": ""})
    assert sum(name.startswith("ablations.") for name in RECIPES) == 13


def test_ade20k_holds_every_value_of_the_papers_appendix():
    tiny, small, base = (get(f"ade20k.upernet_pale_{size}") for size in "tsb")
    for recipe in (tiny, small, base):
        assert (recipe.steps, recipe.batch, recipe.warmup_steps) == (160_000, 16, 1500)
        assert (recipe.peak_lr, recipe.optim.weight_decay) == (6e-5, 0.01)
        assert (recipe.optim.schedule, recipe.optim.min_lr) == ("linear", 0)
        assert (recipe.augment.crop, recipe.augment.scale) == (512, (0.5, 2.0))
        assert (recipe.augment.flip, recipe.augment.distort) == (0.5, 1)
        assert recipe.augment.most_of_one_class == 0.75
        assert (recipe.model.width, recipe.loss.auxiliary) == (512, 0.4)
        assert (recipe.test.scales, recipe.test.flip) == ((1.0,), False)
        assert recipe.multi.scales == (0.75, 1.0, 1.25, 1.5, 1.75)
        assert recipe.multi.flip
        assert recipe.data.reduce_zero
    assert [r.model.drop_path for r in (tiny, small, base)] == [0.3, 0.3, 0.5]
    assert [r.reported.miou for r in (tiny, small, base)] == [50.4, 51.2, 52.2]
    assert [r.reported.miou_multi for r in (tiny, small, base)] == [51.2, 52.2, 53.0]


def test_timm_models_are_built_by_name():
    recipe = get("small_data.pale_t").override({"model.name": "resnet18", "model.drop_path": 0})
    with torch.device("meta"):
        assert isinstance(recipe.model.build(10, 64), timm.models.ResNet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.lrr": 1}, r"no setting 'optim\.lrr'; did you mean 'optim\.lr'"),
        ({"model.attention": "cros"}, r"model\.attention must be 'parallel'.*got 'cros'"),
        ({"epochs": 0}, "epochs must be greater than or equal to 1, got 0"),
        ({"epochs": 10}, "warmup_epochs must be smaller than epochs, got 20 and 10"),
        (
            {"model.name": "resnet50", "model.attention": "axial"},
            r"model: attention applies only to pale_nano.* not to resnet50",
        ),
        ({"data.size": 4}, r"data\.size must be greater than or equal to 16, got 4"),
    ],
    ids=["key", "word", "range", "warm-up", "peer", "size"],
)
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        get("imagenet.pale_t").override(changes)


def test_unknown_recipes_and_models_name_the_nearest():
    with pytest.raises(ValueError, match=r"no recipe 'imagenet\.pale', did you mean 'imagenet"):
        get("imagenet.pale")
    with pytest.raises(ValueError, match="got 'pale_tinny'; did you mean pale_tiny"):
        get("quickstart").override({"model.name": "pale_tinny"}).task().model()


def test_missing_required_settings_are_reported():
    with pytest.raises(ValueError, match=r"finetune\.pale_t needs model\.weights"):
        get("finetune.pale_t").task()
    with pytest.raises(ValueError, match=r"data\.root is not set"):
        get("imagenet.pale_t").task()


def test_files_that_hold_no_recipe_are_refused(tmp_path):
    path = tmp_path / "recipe.yaml"
    with pytest.raises(ValueError, match="no recipe file"):
        read_recipe(path)
    path.write_text("a: [")
    with pytest.raises(ValueError, match="is not YAML"):
        read_recipe(path)
    with pytest.raises(ValueError, match="is not a recipe"):
        parse_recipe([1], "x")
    with pytest.raises(
        ValueError, match="kind must be one of classification, segmentation, detection, got 'poem'"
    ):
        parse_recipe(yaml.safe_load("kind: poem"), "x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment.auto": "foo"}, r"augment\.auto: a policy in timm's notation.*got 'foo'"),
        ({"augment.interpolation": "foo"}, r"augment\.interpolation must be 'nearest'.*got 'foo'"),
        (
            {"augment.scale": [1, 0.1]},
            r"augment\.scale: .*the smaller one first, got \[1\.0, 0\.1\]",
        ),
        ({"augment.scale": [0.1, 2]}, r"augment\.scale: two numbers above 0 and at most 1"),
        ({"augment.ratio": [0, 1]}, r"augment\.ratio: two numbers above 0"),
        ({"model.options": {"depths": 3}}, "depths must be whole numbers .*one per stage, got 3"),
        ({"model.options": {"heads": [0, 2, 4, 8]}}, "heads must be whole numbers of at least 1"),
        ({"batch": 7}, "even number of images .*got batch 7 in 1 parts"),
        ({"batch": 6, "accumulate": 2}, "even number of images .*got batch 6 in 2 parts"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_values_that_would_fail_later_are_refused_at_once(change, message):
    with pytest.raises(ValueError, match=message):
        get("small_data.pale_t").override(change)


def test_an_odd_batch_is_refused_only_with_mixing():
    recipe = get("small_data.pale_t").override({"batch": 6})
    with pytest.raises(ValueError, match="batch 6 in 2 parts"):
        recipe.check_batch_split(2)
    recipe.override({"mix": {"mixup": 0, "cutmix": 0}, "batch": 7})


def test_options_that_a_model_does_not_know_are_named():
    recipe = get("quickstart").override({"model.options": {"depth": 3}})
    with pytest.raises(
        ValueError, match=r"model\.options must be architecture arguments of pale_nano, got .*depth"
    ):
        recipe.model.build(8, 64)


def test_an_interpolation_that_training_draws_is_bicubic_in_evaluation():
    drawn, bicubic = (
        get("quickstart")
        .override({"augment.interpolation": how, "data.size": 32})
        .task()
        .val_data()
        for how in ("random", "bicubic")
    )
    assert torch.equal(drawn[(0, 0)][0], bicubic[(0, 0)][0])
