"""The programs in examples/ run on a CPU and do what they claim. onnx_predict.py is tested in tests/exporting."""

import runpy
from pathlib import Path

import pytest
from PIL import Image

from pale.cli.main import main as pale

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = ("finetune", "custom_dataset", "attention_block")


def load(name):
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["main"]


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_at_most_60_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 60


def test_the_photo_is_a_link_to_the_one_of_the_package():
    with Image.open(EXAMPLES / "cat.jpg") as image:
        assert image.size == (451, 300)


def test_the_examples_are_listed():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in page for path in EXAMPLES.glob("*.py"))


def test_attention_block_equals_global_attention_where_the_pale_is_the_map():
    y, difference = load("attention_block")()
    assert y.shape == (2, 23, 37, 64)
    assert difference < 1e-5


def test_custom_dataset_learns_its_first_image(tmp_path):
    assert load("custom_dataset")(tmp_path) == "red"


@pytest.mark.slow
def test_finetune_learns_from_the_included_weights(tmp_path, capsys):
    assert pale(["weights", "export", "classify_pets", str(tmp_path / "pets")]) in (None, 0)
    # Chance is 0.5 on 64 images; five standard errors above it are 0.81.
    assert load("finetune")(tmp_path / "pets") > 0.85
