"""tools/retired_words.py finds retired words and leaves names alone that cannot change."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("retired_words", ROOT / "tools/retired_words.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("Return the picture.", "picture"),
        ("def as_picture(x):", "picture"),
        ("a loss that is no number", "no number"),
        ("the class is told at the end", "told"),
        ("MOST_PIXELS = 4", "MOST_"),
        ("one a stage", "one a stage"),
    ],
)
def test_a_retired_word_is_found_with_its_line_and_replacement(tool, line, word):
    ((number, found, replacement),) = tool.find(f"fine\n{line}\n")
    assert (number, found) == (2, word)
    assert replacement


@pytest.mark.parametrize(
    "line",
    [
        'Histogram("pale_batch_pictures")',
        "--data.on_device pictures",
        'data={"on_device": "pictures"}',
        "augment.most_of_one_class",
        '"pictures": count,  # kept name: JSON key',
        "at_most = 3",
        "an image",
    ],
)
def test_names_that_cannot_change_are_left_alone(tool, line):
    assert not list(tool.find(line))


def test_only_the_included_weights_are_exempt_from_the_large_file_hook():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    (exempt,) = [re.compile(hook["exclude"]) for hook in hooks if hook["id"] == "large-files"]
    weights = [str(path.relative_to(ROOT)) for path in ROOT.glob("src/pale/**/*.safetensors")]
    assert len(weights) == 6
    assert all(exempt.search(path) for path in weights)
    assert not exempt.search("src/pale/weights/other.safetensors")
    assert not exempt.search("tests/classify_pets.safetensors")
