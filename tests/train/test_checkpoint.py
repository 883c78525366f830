import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from support.recipes import classification_recipe

from pale.cli.main import main
from pale.train import checkpoint
from pale.train.distributed import World
from pale.train.loop import train

ALONE = World(torch.device("cpu"))


def save(folder: Path, step: int, size: int = 10) -> Path:
    folder.parent.mkdir(exist_ok=True)
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
def test_a_damaged_newest_checkpoint_is_ignored_with_a_warning(tmp_path, file, damage):
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
    assert "step_00000006 is damaged and ignored" in words[0]
    # The same step is then written again, in full.
    assert checkpoint.is_good(save(tmp_path, 6))


def test_a_flipped_bit_anywhere_is_noticed(tmp_path):
    path = save(tmp_path, 3)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for i in range(0, len(content), 1 if file.name == "manifest.json" else 23):
            for bit in {i % 8, 5}:  # 5: upper and lower case
                flipped = bytes([content[i] ^ 1 << bit])
                file.write_bytes(content[:i] + flipped + content[i + 1 :])
                assert not checkpoint.is_good(path), (file.name, i, bit)
        file.write_bytes(content)
    assert checkpoint.is_good(path)


def copied(folder: Path) -> None:
    shutil.copytree(folder / "step_00000006", folder / "step_00000006.bak")


def noted(folder: Path) -> None:
    (folder / "step_00000020.bak").touch()


def named(folder: Path) -> None:
    (folder / "step_best").mkdir()


def linked(folder: Path) -> None:
    (folder / "step_00000099").symlink_to(folder / "step_00000003")


def a_file(folder: Path) -> None:
    (folder / "step_00000099").write_text("no folder")


def hidden(folder: Path) -> None:
    (folder / ".step_notes").write_text("mine")


@pytest.mark.parametrize("stray", [copied, noted, named, linked, a_file, hidden])
def test_other_files_stop_neither_saving_nor_resuming_and_are_kept(tmp_path, stray):
    save(tmp_path, 3)
    newest = save(tmp_path, 6)
    stray(tmp_path)
    strays = {path.name for path in tmp_path.iterdir()} - {"step_00000003", "step_00000006"}
    assert checkpoint.newest(tmp_path) == newest
    checkpoint.prune(tmp_path, keep=1, step=6)
    assert {path.name for path in tmp_path.iterdir()} == {"step_00000006"} | strays
    later = save(tmp_path, 9)
    checkpoint.prune(tmp_path, keep=1, step=9)
    assert checkpoint.newest(tmp_path) == later


def test_a_file_with_the_name_of_a_checkpoint_is_replaced(tmp_path):
    (tmp_path / "step_00000003").write_text("no folder")
    assert checkpoint.is_good(save(tmp_path, 3))


def test_another_file_stops_no_run(tmp_path, capsys):
    run = tmp_path / "run"
    train(classification_recipe(epochs=1, saving__every_steps=1), run, ALONE, quiet=True)
    copied_from = max((run / "checkpoints").glob("step_*"))
    shutil.copytree(copied_from, run / "checkpoints/step_00000020.bak")
    words = ["train", "--resume", str(run), "--device", "cpu", "--epochs", "2"]
    assert main(words) == 0, capsys.readouterr()
    assert (run / "checkpoints/step_00000020.bak").is_dir()


def absolute(path: Path, files: dict) -> None:
    files[str(path.parent / "outside")] = files.pop("model.safetensors")


def above(path: Path, files: dict) -> None:
    files["../outside"] = files.pop("model.safetensors")


def in_a_folder(path: Path, files: dict) -> None:
    (path / "sub").mkdir()
    (path / "model.safetensors").rename(path / "sub/model.safetensors")
    files["sub/model.safetensors"] = files.pop("model.safetensors")


def link(path: Path, files: dict) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(path.parent / "outside")


def hard_to_read(path: Path, files: dict) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    files["model.safetensors"]["bytes"] = 0


def not_listed(path: Path, files: dict) -> None:
    shutil.copy(path / "model.safetensors", path / "ema.safetensors")


def without_trainer(path: Path, files: dict) -> None:
    del files["trainer.pt"]


@pytest.mark.parametrize(
    "harm",
    [absolute, above, in_a_folder, link, hard_to_read, not_listed, without_trainer],
)
def test_a_manifest_names_the_files_of_its_folder_and_no_others(tmp_path, harm):
    good, path = save(tmp_path, 3), save(tmp_path, 6)
    shutil.copy(path / "model.safetensors", tmp_path / "outside")
    manifest = json.loads((path / "manifest.json").read_text())
    harm(path, manifest["files"])
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert not checkpoint.is_good(path)
    assert not checkpoint.is_good(path, sums=False)
    assert checkpoint.newest(tmp_path) == good


@pytest.mark.parametrize(
    "content",
    [
        b"[1]",
        b"7",
        b'{"step": 6, "files": []}',
        b'{"step": 6, "files": {"trainer.pt": 3}}',
        b'{"step": 6, "files": {"trainer.pt": {"bytes": "0", "sha256": 1}}}',
        b'{"step": 6, "files": {}}',
        b'{"step": 6, "files": {"a\\u0000b": {}}}',
        b"[" * 200_000,
        b"\xff\xfe",
    ],
    ids=range(9),
)
def test_a_manifest_of_another_form_is_a_damaged_checkpoint(tmp_path, content):
    good, path = save(tmp_path, 3), save(tmp_path, 6)
    (path / "manifest.json").write_bytes(content)
    assert checkpoint.newest(tmp_path) == good


@pytest.mark.parametrize("kind", ["link", "pipe", "huge"])
def test_a_manifest_that_is_large_or_not_a_regular_file_is_not_read(tmp_path, kind, monkeypatch):
    path = save(tmp_path, 3)
    (path / "manifest.json").rename(tmp_path / "elsewhere")
    if kind == "link":
        (path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path / "manifest.json")
    else:
        shutil.copy(tmp_path / "elsewhere", path / "manifest.json")
        assert checkpoint.is_good(path)
        monkeypatch.setattr(checkpoint, "MAX_MANIFEST", 100)
    assert not checkpoint.is_good(path)


def test_newest_of_none_is_none(tmp_path):
    assert checkpoint.newest(tmp_path / "nothing") is None


def test_only_the_newest_are_kept_and_temporary_files_are_removed(tmp_path):
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


def test_a_full_disk_loses_nothing_and_the_message_shows_how_to_resume(tmp_path):
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
