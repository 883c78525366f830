"""Models by name and options that may come from a file."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from support.weights import RECIPES

from pale.predict import bundle as loading
from pale.tasks.building import TooLargeError, _Bounded, allowed_options, build_for, create
from pale.weights.read import Weights
from pale.weights.write import save_weights

FILES = {
    *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_filter_fn"),
    *("pretrained_strict", "checkpoint_path", "cache_dir", "model_cfg", "feature_cfg", "pruned"),
    *("url", "file", "hf_hub_id", "kwargs", "args", "num_classes", "device", "dtype"),
}


def test_no_model_accepts_options_that_name_files():
    names = timm.list_models()
    assert len(names) > 1000
    for name in names:
        allowed = allowed_options(name)
        assert not allowed & FILES, name
        assert {"drop_rate", "global_pool"} <= allowed


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pale_nano", {"depths": [1, 1, 1, 1], "backend": "sdpa", "drop_rate": 0.1}),
        ("resnet10t", {"channels": [8, 8, 8, 8], "global_pool": "max"}),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 24, "img_size": 64, "window_size": 4}),
    ],
)
def test_options_of_the_architecture_are_passed_on(name, options):
    model = create(name, {"num_classes": 3}, options)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": True}, "must be architecture arguments of .*, got pretrained"),
        ({"num_classes": 7}, "got num_classes"),
        ({"embed_dim": 10**6}, r"embed_dim must be a number up to 65536, .* got 1000000"),
        ({"embed_dim": float("nan")}, "got nan"),
        ({"depths": [2] * 65}, "at most 64 of them"),
        ({"depths": [[[2]]]}, "must be a number"),
        ({"norm_layer": "/etc/passwd"}, "got '/etc/passwd'"),
        ({"norm_layer": "http://x"}, "got 'http://x'"),
        ({"window_size": "seven"}, "got 'seven'"),
        ({"qkv_bias": {"a": 1}}, "got {'a': 1}"),
        ({"patch_size": 0}, r"model\.options must be arguments of swin"),
    ],
)
def test_other_options_and_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        create("swin_tiny_patch4_window7_224", {}, options)


def test_building_on_the_meta_device_is_bounded():
    with (
        pytest.raises(TooLargeError, match="too many operations"),
        _Bounded(100),
        torch.device("meta"),
    ):
        create("pale_nano", {}, {})
    with pytest.raises(TooLargeError, match=r"a tensor of shape \(1000000000,\)"), _Bounded(100):
        torch.zeros(10**9)
    x = torch.arange(50_000)
    with pytest.raises(TooLargeError, match=r"a tensor of shape \(50000, 50000\)"), _Bounded(100):
        torch.outer(x, x)


def test_a_model_that_fits_is_built_as_before():
    """Building on the meta device does not change the random state."""
    torch.manual_seed(3)
    plain = create("pale_nano", {"num_classes": 3}, {})
    torch.manual_seed(3)
    given = Weights(plain.state_dict())
    built = build_for(given, lambda: create("pale_nano", {"num_classes": 3}, {}), "x")
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, built.state_dict()[name])


@pytest.mark.parametrize(
    ("task", "about", "expected"),
    [
        ("segmentation", {"colours": [[1, 2, 3], [4, 5, 6]]}, ((1, 2, 3), (4, 5, 6))),
        ("segmentation", {"colours": [[1, 2, 3]]}, None),
        ("segmentation", {"colours": [[1, 2, 256], [4, 5, 6]]}, None),
        ("segmentation", {"colours": [[1, 2], [4, 5, 6]]}, None),
        ("detection", {"categories": [7, 90]}, (7, 90)),
        ("detection", {"categories": ["7", 90]}, (1, 2)),
        ("detection", {"categories": {"a": 1}}, (1, 2)),
    ],
)
def test_colours_and_ids_come_from_the_header(tmp_path, task, about, expected):
    recipe = RECIPES[task]()
    path = tmp_path / "a.safetensors"
    save_weights(
        path,
        recipe.model.build(2, 32).state_dict(),
        {"recipe": recipe.plain(), "classes": ["a", "b"], **about},
    )
    loaded = loading.load(path)
    found = loaded.pipeline.colours if task == "segmentation" else loaded.pipeline.categories
    assert len(found) == 2
    if expected is not None:
        assert found == expected


def test_weights_of_earlier_versions_are_loaded(tmp_path):
    """Without a checksum, colours or ids in the header."""
    recipe = RECIPES["classification"]()
    path = tmp_path / "a.safetensors"
    model = recipe.model.build(1000, 32)
    save_file(model.state_dict(), path)
    with pytest.raises(ValueError, match="has no recipe in its header"):
        loading.load(path)
    save_weights(path, model.state_dict(), {"recipe": recipe.plain()})
    assert len(loading.load(path).classes) == 0
