"""The queue of resumable commands: side by side, stopped softly, resumed, collected in pieces. With real processes."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/run_queue.py"
# Counts to a number in a file, one each 20 ms, and resumes where SIGTERM stopped it.
COUNT = """
import signal, sys, time
from pathlib import Path
path, end = Path(sys.argv[1]), int(sys.argv[2])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
done = int(path.read_text()) if path.exists() else 0
print("from", done, flush=True)
while done < end and not stop:
    time.sleep(0.02)
    done += 1
path.write_text(str(done))
sys.exit(f"stopped at {done}" if done < end else None)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"

Run = Callable[..., list[dict[str, str]]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return __import__("run_queue")


@pytest.fixture
def run(script: ModuleType, tmp_path: Path) -> Run:
    """Return a function that runs commands and returns the state, exit code and last line of each."""

    def start(*lines: str, expect: str = "", **options: object) -> list[dict[str, str]]:
        (tmp_path / "jobs.txt").write_text("\n".join(lines))
        words = [str(tmp_path / "jobs.txt"), str(tmp_path / "logs")]
        for name, value in options.items():
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            if expect:
                with pytest.raises(SystemExit, match=expect):
                    script.main(words)
            else:
                script.main(words)
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
                signal.signal(number, handler)
        table = (tmp_path / "logs/summary.md").read_text().splitlines()[2:]
        cells = [[cell.strip() for cell in line.split("|")] for line in table]
        return [{"state": row[2], "code": row[3], "last": row[6]} for row in cells]

    return start


def python(code: str, *words: object) -> str:
    return shlex.join(["python", "-c", f"exec({code!r})", *map(str, words)])


def test_commands_run_side_by_side_and_are_not_repeated(run: Run, tmp_path: Path) -> None:
    note = "import sys, time; print(time.time()); time.sleep(0.6); print(time.time())"
    lines = ["# first", python(note), "", python(note)]
    rows = run(*lines, jobs=2)
    assert [row["state"] for row in rows] == ["ended", "ended"]
    logs = [(tmp_path / f"logs/00{i}.txt").read_text().splitlines()[1:] for i in (1, 2)]
    (a, b), (c, d) = ([float(line) for line in log] for log in logs)
    assert max(a, c) < min(b, d)  # both ran at one time
    run(*lines, jobs=2)
    assert [(tmp_path / f"logs/00{i}.txt").read_text().splitlines()[1:] for i in (1, 2)] == logs


def test_at_the_end_of_the_time_commands_save_and_go_on_in_the_next_run(
    run: Run, tmp_path: Path
) -> None:
    lines = [python(COUNT, tmp_path / "count", 200), "wait", python("print('after')")]
    rows = run(*lines, minutes=1.0 / 60, grace=20)
    assert [row["state"] for row in rows] == ["stopped", "waiting"]
    count = int((tmp_path / "count").read_text())
    assert 0 < count < 200
    assert rows[0]["last"] == f"stopped at {count}"
    rows = run(*lines)
    assert [row["state"] for row in rows] == ["ended", "ended"]
    assert f"from {count}" in (tmp_path / "logs/001.txt").read_text()
    assert rows[1]["last"] == "after"


def test_what_does_not_save_in_time_is_killed_with_its_workers(run: Run, tmp_path: Path) -> None:
    child = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {STUBBORN!r}]); "
    child += "print(p.pid, flush=True); "
    began = time.monotonic()
    rows = run(python(child + STUBBORN), minutes=1.0 / 60, grace=0.5, expect="failed or killed: 1")
    assert time.monotonic() - began < 30
    assert rows[0]["state"] == "killed"
    worker = int(rows[0]["last"])
    for _ in range(50):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            break
        if "Z" in Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]:
            break
        time.sleep(0.1)
    else:
        pytest.fail("the worker still runs")


def test_errors_do_not_stop_other_commands_but_those_that_wait(run: Run) -> None:
    lines = [python("raise SystemExit(3)"), python("print(1)"), "wait", python("print(2)")]
    rows = run(*lines, expect="failed or killed: 1")
    assert [(row["state"], row["code"]) for row in rows] == [
        ("failed", "3"),
        ("ended", "0"),
        ("waiting", ""),
    ]


def test_a_signal_stops_the_queue_softly(tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text(python(COUNT, tmp_path / "count", 3000))
    words = [sys.executable, str(SCRIPT), str(tmp_path / "jobs.txt"), str(tmp_path / "logs")]
    log = tmp_path / "logs/001.txt"
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        while not (log.exists() and "from 0" in log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "001 stopped" in output
    assert 0 <= int((tmp_path / "count").read_text()) < 3000


def test_files_are_collected_in_pieces_that_can_be_joined(run: Run, tmp_path: Path) -> None:
    results = tmp_path / "out/results"
    results.mkdir(parents=True)
    for i in range(4):
        (results / f"{i}.json").write_bytes(os.urandom(700_000))
    (results / "other.txt").write_text("not asked for")
    run(python("print()"), collect=[f"{results}/*.json"], piece_mb=1)
    pieces = sorted((tmp_path / "logs").glob("collected.tgz.*"))
    assert len(pieces) == 3
    assert max(path.stat().st_size for path in pieces) == 1_000_000
    whole = io.BytesIO(b"".join(path.read_bytes() for path in pieces))
    with tarfile.open(fileobj=whole) as tar:
        names = {Path(member.name).name: member.size for member in tar}
    assert names == {f"{i}.json": 700_000 for i in range(4)}


@pytest.mark.slow
def test_weights_of_runs_are_packed(run: Run, tmp_path: Path) -> None:
    train = f"pale train quickstart --output {tmp_path}/runs/first --steps 2 --warmup_steps 0"
    train += " --batch 8 --data.samples 64 --data.val_samples 32 --data.workers 0"
    rows = run(train, pack=[f"{tmp_path}/runs/*"])
    assert rows[0]["state"] == "ended", rows
    (piece,) = (tmp_path / "logs").glob("collected.tgz.*")
    with tarfile.open(piece) as tar:
        assert [Path(name).name for name in tar.getnames()] == ["first.safetensors"]
    packed = tmp_path / "logs/packed/first.safetensors"
    whole = tmp_path / "runs/first/weights.safetensors"
    assert packed.stat().st_size < 0.5 * whole.stat().st_size
    assert json.loads((tmp_path / "logs/ended.json").read_text()) == [train]


def test_lists_without_commands_are_refused(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "jobs.txt").write_text("# nothing\nwait\n")
    with pytest.raises(SystemExit, match="has no command"):
        script.main([str(tmp_path / "jobs.txt"), str(tmp_path / "logs")])
    (tmp_path / "jobs.txt").write_text("pale demo\npale 'demo")
    with pytest.raises(SystemExit, match="line 2: No closing quotation"):
        script.main([str(tmp_path / "jobs.txt"), str(tmp_path / "logs")])
