import os

import pytest
from pydantic import Field

from pale.core.settings import MAX_FILE, Settings, dotted_names, read_value, vary


class Optim(Settings):
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)


class Run(Settings):
    epochs: int = 3
    optim: Optim = Optim()
    extra: Optim | None = None


def test_overrides_reach_inner_parts_and_leave_the_base_alone():
    base = Run()
    assert base.override({"optim.lr": 0.1, "epochs": 5}).optim.lr == 0.1
    assert vary(base, optim={"lr": 0.2}, epochs=4) == Run(epochs=4, optim=Optim(lr=0.2))
    assert base == Run()
    assert Run.parse(base.plain()) == base


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.lrr": 1}, "there is no setting 'optim.lrr'; did you mean 'optim.lr'?"),
        ({"optimm.lr": 1}, "there is no setting 'optimm.lr'; did you mean 'optim.lr'?"),
        ({"optim.learning_rate": 3}, "did you mean 'optim.lr'?"),
        ({"learning_rate": 3}, "did you mean 'optim.lr'?"),
        ({"lr": 1}, "there is no setting 'lr'; did you mean 'optim.lr'?"),
        ({"zzzz": 1}, "there is no setting 'zzzz'; there are epochs, optim, extra"),
        ({"optim.lr": -1}, "optim.lr must be greater than 0, got -1"),
        ({"epochs": "many"}, "epochs must be a valid integer, got 'many'"),
        (
            {"optim": "adamw"},
            "optim is a group of settings, not a setting, got 'adamw'",
        ),
        ({"epochs.more": 1}, "epochs is 3 and has no part 'more'; set epochs itself"),
        ({"optim.lr": float("nan")}, "optim.lr must be a finite number"),
    ],
    ids=[
        "inner",
        "outer",
        "usual",
        "usual and bare",
        "bare",
        "far",
        "range",
        "type",
        "group",
        "depth",
        "nan",
    ],
)
def test_wrong_settings_name_the_field_and_the_nearest_one(changes, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Run().override(changes)
    assert message in str(error.value)
    assert "pydantic" not in str(error.value)


def test_unknown_keys_of_a_file_are_refused_too():
    with pytest.raises(ValueError, match=r"no setting 'optim\.lrr'; did you mean 'optim\.lr'"):
        Run.parse({"optim": {"lrr": 1}})


def test_names_are_all_dotted_names():
    assert list(dotted_names(Run)) == [
        "epochs",
        "optim",
        "optim.lr",
        "optim.betas",
        "extra",
        "extra.lr",
        "extra.betas",
    ]


def test_a_value_may_be_in_a_file(tmp_path):
    path = tmp_path / "sources.yaml"
    path.write_text("- {name: a, weight: 2}\n- {name: b}\n")
    assert read_value(f"@{path}") == [{"name": "a", "weight": 2}, {"name": "b"}]
    with pytest.raises(ValueError, match=r"missing\.yaml cannot be read \(No such file"):
        read_value(f"@{tmp_path}/missing.yaml")
    path.write_text("a: &x [1]\nb: *x\n")
    with pytest.raises(ValueError, match=r"sources\.yaml is not YAML: aliases"):
        read_value(f"@{path}")
    path.write_bytes(b" " * (MAX_FILE + 1))
    with pytest.raises(ValueError, match="has more than 524288 bytes"):
        read_value(f"@{path}")


@pytest.mark.timeout(20)
def test_a_value_is_not_read_from_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ValueError, match="is not a regular file"):
        read_value(f"@{tmp_path}/pipe.yaml")
