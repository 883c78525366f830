"""One process at a time in the folder of a run."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support.processes import torchrun, torchrun_failing
from support.recipes import classification_recipe

from pale.cli.main import main
from pale.recipes.files import recipe_to_yaml
from pale.train import run_lock as lock
from pale.train.distributed import World
from pale.train.run_lock import RunLockedError, UnlockedRunWarning, acquire, run_lock

ALONE = World(torch.device("cpu"))

HOLDER = """
import sys, time
from pathlib import Path
from pale.train.run_lock import acquire
held = acquire(Path(sys.argv[1]))
print("held", flush=True)
if len(sys.argv) > 2:  # a reading process, which outlives this one
    import os
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
time.sleep(60)
"""


def holder(run: Path, *words: str) -> subprocess.Popen:
    run.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run), *words],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout.readline() == "held\n"
    return child


def end(child: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()


@pytest.mark.slow
def test_a_second_process_is_refused_with_the_id_of_the_first(tmp_path, capsys):
    child = holder(tmp_path / "run")
    try:
        (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(classification_recipe()))
        words = ["train", "--config", str(tmp_path / "recipe.yaml"), "--device", "cpu"]
        assert main([*words, "--output", str(tmp_path / "run")]) == 1
        err = capsys.readouterr().err
        assert f"is in use by process {child.pid} on {socket.gethostname()!r} since" in err
        assert "choose another folder: --output DIR" in err
        assert "Traceback" not in err
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
        assert main([*words, "--output", str(tmp_path / "other")]) == 0
    finally:
        end(child)


@pytest.mark.slow
def test_several_processes_of_a_second_run_are_all_refused(tmp_path):
    child = holder(tmp_path / "run")
    try:
        (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(classification_recipe()))
        words = ["train", "--config", tmp_path / "recipe.yaml", "--device", "cpu"]
        err = torchrun_failing(*words, "--output", tmp_path / "run")
        assert err.count(f"is in use by process {child.pid} on") == 2
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    finally:
        end(child)
    torchrun(*words, "--output", tmp_path / "run")  # two processes of one run share its lock
    assert not (tmp_path / "run/.lock").exists()


@pytest.mark.slow
def test_two_runs_started_at_once_leave_one_whole_run(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe_to_yaml(classification_recipe(epochs=6, saving__every_steps=1)))
    command = [sys.executable, "-m", "pale", "train", "--config", recipe]
    command += ["--output", tmp_path / "run", "--device", "cpu"]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=120) for child in children]
    codes = sorted(child.returncode for child in children)
    assert codes == [0, 1], outputs
    words = next(t for t, child in zip(outputs, children, strict=True) if child.returncode)[1]
    assert "is in use by process" in words or "already holds a run" in words
    steps = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [e["step"] for e in steps if e["event"] == "step"] == list(range(1, 18))


@pytest.mark.slow
@pytest.mark.parametrize("reader", [False, True], ids=["alone", "with-a-reading-process"])
def test_a_kill_releases_the_lock_at_once(tmp_path, reader):
    child = holder(tmp_path, *["reader"] * reader)
    try:
        time.sleep(0.2 * reader)  # until it has forked
        with pytest.raises(RunLockedError, match=f"process {child.pid}"):
            acquire(tmp_path)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        with run_lock(tmp_path, ALONE):
            pass
    finally:
        end(child)


def test_the_lock_is_taken_once_and_leaves_no_trace(tmp_path):
    with run_lock(tmp_path / "new/run", ALONE):
        pass
    assert not list(tmp_path.iterdir())
    with run_lock(tmp_path / "run", ALONE):
        about = json.loads((tmp_path / "run/.lock").read_text())
        assert about["pid"] == os.getpid()
        assert about["host"] == socket.gethostname()
        with pytest.raises(RunLockedError):
            acquire(tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing was written
    with run_lock(tmp_path / "run", ALONE):
        (tmp_path / "run/log.jsonl").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"pid": "x"}', b"[" * 9000])
def test_a_holder_that_is_not_known_is_another_process(tmp_path, content):
    with run_lock(tmp_path, ALONE):
        (tmp_path / ".lock").write_bytes(content)
        with pytest.raises(RunLockedError, match="is in use by another process;"):
            acquire(tmp_path)


def test_only_the_first_process_holds_the_lock_and_errors_reach_all(tmp_path, monkeypatch):
    outputs = []
    monkeypatch.setattr(World, "gather", lambda self, value: outputs.append(value) or [value, None])
    first, second = (World(torch.device("cpu"), rank, 2) for rank in (0, 1))
    with run_lock(tmp_path, first):
        # The second process gathers, and opens nothing.
        monkeypatch.setattr(World, "gather", lambda self, value: [None, value])
        monkeypatch.setattr(lock, "acquire", None)
        monkeypatch.setattr(World, "broadcast", lambda self, value: ([], 3))
        with run_lock(tmp_path, second):
            pass
        assert (tmp_path / ".lock").exists()


def test_a_file_system_without_locks_is_reported_and_used(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", refuse)
    with pytest.warns(UnlockedRunWarning, match="cannot be locked .* no other process trains"):
        assert acquire(tmp_path) is None


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "target").write_text("keep")
    (tmp_path / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match=r"symbolic links|Too many levels"):
        acquire(tmp_path)
    assert (tmp_path / "target").read_text() == "keep"
