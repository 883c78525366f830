import pytest
import torch
from torch import nn

from pale.tasks.classification.metric import TopK

NAMES = ["a", "b", "c"]


class Fixed(nn.Module):
    """Returns the images, which are logits."""

    def forward(self, images):
        return images


def measured(logits, labels, parts=1):
    """The metric over all samples, divided among `parts` processes."""
    metrics = []
    keys = torch.stack([torch.zeros(len(labels)), torch.arange(len(labels))], 1).long()
    for part in range(parts):
        metric = TopK(NAMES)
        for own in torch.arange(len(labels))[part::parts].split(4):
            batch = {"images": logits[own], "labels": labels[own], "keys": keys[own]}
            metric.update(Fixed(), batch)
        metrics.append(metric)
    figures = metrics[0].merge([metric.state() for metric in metrics])
    return figures, metrics[0].details()


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(3)
    return 3 * torch.randn(60, 3, generator=generator), torch.arange(60) % 3


def test_the_confusion_matrix_and_its_rates_equal_a_count(samples):
    logits, labels = samples
    figures, details = measured(logits, labels)
    guesses = logits.argmax(1)
    pairs = list(zip(labels.tolist(), guesses.tolist(), strict=True))
    expected = [[pairs.count((i, j)) for j in range(3)] for i in range(3)]
    assert details["confusion"] == expected
    assert figures["top1"] == pytest.approx(100 * sum(i == j for i, j in pairs) / 60)
    for i, row in enumerate(details["per_class"]):
        assert (row["class"], row["images"]) == (NAMES[i], 20)
        assert row["accuracy"] == pytest.approx(100 * expected[i][i] / 20)
        guessed = sum(expected[k][i] for k in range(3))
        assert row["precision"] == pytest.approx(100 * expected[i][i] / guessed)


def test_the_most_confident_mistakes_and_hits_are_those_of_a_full_sort(samples):
    logits, labels = samples
    details = measured(logits, labels)[1]
    certainty, guesses = logits.softmax(1).max(1)
    for name, chosen in (
        ("confident_mistakes", guesses != labels),
        ("confident_hits", guesses == labels),
    ):
        order = sorted(chosen.nonzero()[:, 0].tolist(), key=lambda i: -certainty[i])[:24]
        found = details[name]
        assert [entry[1] for entry in found] == order
        assert [entry[0] for entry in found] == pytest.approx(certainty[order].tolist())
        assert [entry[2:] for entry in found] == [(int(labels[i]), int(guesses[i])) for i in order]


def test_several_processes_find_the_same(samples):
    assert measured(*samples, parts=3)[1] == measured(*samples)[1]


def test_of_equally_confident_guesses_the_first_samples_are_kept():
    logits = torch.zeros(60, 3)
    logits[:, 0] = 200.0  # probability 1 in float32
    labels = torch.zeros(60).long()
    for parts in (1, 3):
        details = measured(logits, labels, parts)[1]
        assert [entry[1] for entry in details["confident_hits"]] == list(range(24))
        assert details["confident_mistakes"] == []


def test_logits_that_are_nan_are_not_confident():
    logits = torch.full((4, 3), torch.nan)
    details = measured(logits, torch.zeros(4).long())[1]
    assert details["confident_hits"] == details["confident_mistakes"] == []


def test_a_class_without_images_or_predictions_has_no_rates():
    details = measured(torch.tensor([[5.0, 0.0, 0.0]]), torch.tensor([0]))[1]
    empty = {"class": "b", "images": 0, "accuracy": None, "precision": None}
    assert details["per_class"][1] == empty
