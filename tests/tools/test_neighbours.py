import json
import math

import numpy as np
import pytest
import torch

from pale.cli.main import main
from pale.tools import neighbours
from pale.tools.features import Features
from pale.tools.neighbours import find_neighbours, score_neighbours


def clouds(n: int, seed: int, spread: float = 3.0, classes: int = 5, width: int = 6) -> Features:
    """Return overlapping clouds of points, one per class, of any length."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(0).normal(0, 2, (classes, width))
    labels = rng.integers(0, classes, n)
    vectors = (centres[labels] + rng.normal(0, spread, (n, width))) * rng.uniform(0.1, 9, (n, 1))
    names = [str(i) for i in range(n)]
    return Features(torch.tensor(vectors).float(), torch.tensor(labels), names, list("abcde"))


def brute_force(train: Features, val: Features, k: int, temperature: float) -> list[int]:
    """Return the class of each validation image, by loops in float64."""
    found = []
    bank = [np.asarray(v, np.float64) for v in train.vectors]
    for query in (np.asarray(v, np.float64) for v in val.vectors):
        scores = [
            float(np.dot(query, v)) / math.sqrt(float(np.dot(query, query) * np.dot(v, v)))
            for v in bank
        ]
        nearest = sorted(range(len(bank)), key=lambda i: -scores[i])[:k]
        votes = [0.0] * len(train.classes)
        for i in nearest:
            votes[int(train.labels[i])] += math.exp(scores[i] / temperature)
        found.append(votes.index(max(votes)))
    return found


@pytest.mark.parametrize("chunks", [(7, 11), (64, 1000), (1, 3)], ids=str)
@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (20, 5.0), (97, 0.5)])
def test_the_vote_is_that_of_a_brute_force_search(monkeypatch, chunks, k, temperature):
    monkeypatch.setattr(neighbours, "QUERIES", chunks[0])
    monkeypatch.setattr(neighbours, "BANK", chunks[1])
    train, val = clouds(97, 1), clouds(60, 2)
    expected = torch.tensor(brute_force(train, val, k, temperature))
    right = 100 * float((expected == val.labels).double().mean())
    found = score_neighbours(train, val, k, temperature)
    assert found.val == pytest.approx(right, abs=1e-9)
    # Not only as many right ones: labelled with the expected classes, all are right.
    agreed = Features(val.vectors, expected, val.names, val.classes)
    assert score_neighbours(train, agreed, k, temperature).val == 100
    assert 25 < found.val < 95  # neither chance (20 %) nor an easy set


def test_neighbours_and_weights_matter_on_this_data():
    train, val = clouds(400, 1), clouds(300, 2)
    scores = {k: score_neighbours(train, val, k).val for k in (1, 20)}
    assert scores[20] > scores[1] + 3
    assert len({tuple(brute_force(train, clouds(60, 2), 97, t)) for t in (0.02, 5.0)}) == 2


def test_neighbours_are_found_across_chunks_nearest_first(monkeypatch):
    monkeypatch.setattr(neighbours, "BANK", 10)
    bank = torch.nn.functional.normalize(torch.randn(35, 4, dtype=torch.float64), dim=1)
    similarity, where = find_neighbours(3 * bank[[4, 33]], bank, 5)
    assert where[:, 0].tolist() == [4, 33]
    torch.testing.assert_close(similarity, (bank[[4, 33]] @ bank.T).topk(5).values)
    assert (similarity.diff(dim=1) <= 0).all()


def test_a_low_temperature_does_not_overflow():
    train, val = clouds(50, 1), clouds(50, 2)
    assert score_neighbours(train, val, 9, 1e-4).val == score_neighbours(train, val, 1).val


def change(features: Features, **fields: object) -> Features:
    return Features(**vars(features) | fields)


@pytest.mark.parametrize(
    ("train", "val", "k", "message"),
    [
        ({}, {}, 0, "from 1 to 30, the number of training images, got 0"),
        ({}, {}, 31, "from 1 to 30, the number of training images, got 31"),
        ({}, {"classes": list("vwxyz")}, 5, "need the same classes"),
        ({"vectors": torch.full((30, 6), math.nan)}, {}, 5, "training features contain NaN"),
        ({}, {"vectors": torch.full((30, 6), math.inf)}, 5, "validation features contain NaN"),
        ({}, {"vectors": torch.ones(30, 7)}, 5, "features of one model, got 6 and 7"),
        ({}, {"vectors": torch.ones(0, 6), "labels": torch.ones(0).long()}, 5, "contain no image"),
    ],
)
def test_what_cannot_be_scored_is_refused(train, val, k, message):
    first, second = clouds(30, 1), clouds(30, 2)
    with pytest.raises(ValueError, match=message):
        score_neighbours(change(first, **train), change(second, **val), k)
    with pytest.raises(ValueError, match="temperature must be above 0, got 0"):
        score_neighbours(first, second, 5, 0)


def test_the_command_scores_neighbours_beside_the_linear_classifier(tmp_path, capsys):
    files = [tmp_path / "train.safetensors", tmp_path / "val.safetensors"]
    for seed, path in enumerate(files):
        clouds(200, seed, spread=1.0).save(path)
    words = ["probe", *map(str, files), "--neighbours", "20"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = score_neighbours(*map(Features.load, files), 20)
    assert found["neighbours"] == {"val": expected.val, "k": 20, "temperature": 0.07}
    assert found["val"] > 60
    assert main(words) == 0
    assert f"top-1 {expected.val:.2f} % by 20 nearest neighbours" in capsys.readouterr().out
    assert main([*words[:-1], "201"]) == 1
    assert "from 1 to 200" in capsys.readouterr().err
