import resource
import signal
from pathlib import Path

import pytest
import torch

from pale.train import checkpoint


def save(folder: Path, step: int, size: int = 10) -> Path:
    models = {"model": {"w": torch.full((size,), float(step))}}
    return checkpoint.save(folder, step, models, {"step": step, "x": torch.ones(2)}, {"a": 1})


def test_what_is_saved_is_loaded(tmp_path):
    path = save(tmp_path, 3)
    models = checkpoint.load_models(path)
    state = checkpoint.load_trainer(path, torch.device("cpu"))
    assert torch.equal(models["model"]["w"], torch.full((10,), 3.0))
    assert state["step"] == 3
    assert torch.equal(state["x"], torch.ones(2))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", "cut"),
        ("model.safetensors", "gone"),
        ("model.safetensors", "bit"),
        ("trainer.pt", "cut"),
        ("trainer.pt", "gone"),
        ("trainer.pt", "bit"),
        ("manifest.json", "cut"),
        ("manifest.json", "gone"),
    ],
)
def test_a_damaged_newest_one_is_passed_over_with_a_word(tmp_path, file, damage):
    good = save(tmp_path, 3)
    bad = save(tmp_path, 6) / file
    content = bytearray(bad.read_bytes())
    if damage == "cut":
        bad.write_bytes(content[: len(content) // 2])
    elif damage == "gone":
        bad.unlink()
    else:
        content[len(content) // 2] ^= 1
        bad.write_bytes(content)
    words: list[str] = []
    assert checkpoint.newest(tmp_path, words.append) == good
    assert len(words) == 1
    assert "step_00000006 is damaged and passed over" in words[0]
    # The same step is then written again, in full.
    assert checkpoint.is_good(save(tmp_path, 6))


def test_newest_of_none_is_none(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing") is None


def test_only_the_newest_are_kept_and_leavings_are_cleared(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / ".step_00000009.1").mkdir()
    (tmp_path / ".step_00000009.1" / "model.safetensors").touch()
    # A damaged one does not count as kept.
    (tmp_path / "step_00000003" / "trainer.pt").unlink()
    checkpoint.prune(tmp_path, keep=2, step=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000004"]
    checkpoint.prune(tmp_path, keep=2, step=2)  # the run went back
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_full_disk_loses_nothing_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    good = save(folder, 3)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        with pytest.raises(OSError, match="could not be written") as error:
            save(folder, 6, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert f"{good} is the last good one" in str(error.value)
    assert f"pale train --resume {tmp_path / 'run'}" in str(error.value)
    assert [path.name for path in folder.iterdir()] == [good.name]
    assert checkpoint.newest(folder) == good


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "weights"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("no space left")

    with pytest.raises(OSError, match=r"weights could not be written \(no space left\)"):
        checkpoint.write_file(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["weights"]
