"""Run a list of resumable commands, several side by side, for a limited time; then save, collect and summarise.

    python benchmarks/run_queue.py JOBS LOGS --minutes 28 --jobs 3 --collect 'OUT/results' 'OUT/runs/*/log.jsonl'
    python benchmarks/run_queue.py JOBS LOGS --minutes 28 --pack 'OUT/runs/*' --piece-mb 16

JOBS is a text file with one command per line, the most important first; `python` is this interpreter and `pale` its
package. Empty lines and lines that start with # are ignored. After a line `wait`, commands start only when all before
it have ended without an error, for example tables after runs.

At --minutes no command starts any more, and the running ones get SIGTERM, on which `pale train` and the scripts here
save a checkpoint; after --grace seconds they are killed. SIGTERM and Ctrl-C do the same at once. Repeated, the script
runs only what has not ended, so commands must resume where they stopped.

LOGS gets the output of each command and summary.md, which is current at any time; at the end, collected.tgz with the
files and folders that --collect names and the packed weights of the runs that --pack names (int8, about a quarter), in
pieces of --piece-mb: `cat collected.tgz.* | tar xz` unpacks them.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pale.core.escaping import escape_line
from pale.errors import PaleError
from pale.tools.publish import pack

WAIT = "wait"
LAST_BYTES = 2000  # of an output that are read for its last line


@dataclass
class Job:
    """A command of the queue.

    Attributes:
        number: from 1, in the order of the file; also the name of the log.
        words: the command.
        stage: number of `wait` lines before it.
        state: waiting, running, ended, stopped (by the end of the time), killed (after the grace) or failed.
        seconds: for which it ran.
    """

    number: int
    words: list[str]
    stage: int
    state: str = "waiting"
    seconds: float = 0.0
    code: int | None = None
    began: float = 0.0
    process: subprocess.Popen[bytes] | None = None

    @property
    def text(self) -> str:
        """The command as it is written in the file."""
        return shlex.join(self.words)

    def start(self, log: Path) -> None:
        """Start the command in a process group of its own, so that its workers can be killed with it."""
        head, *rest = self.words
        names = {"python": [sys.executable], "pale": [sys.executable, "-m", "pale"]}
        with log.open("ab") as file:
            file.write(f"+ {self.text}\n".encode())
            file.flush()
            self.process = subprocess.Popen(
                [*names.get(head, [head]), *rest],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self.state, self.began = "running", time.monotonic()

    def poll(self, stopping: bool) -> bool:
        """Return whether the command is still running; note how it ended."""
        assert self.process is not None
        self.code = self.process.poll()
        self.seconds = time.monotonic() - self.began
        if self.code is None:
            return True
        self.state = "ended" if self.code == 0 else "stopped" if stopping else "failed"
        self.kill()  # workers that it left
        return False

    def kill(self) -> None:
        """Kill the command and all processes of its group."""
        assert self.process is not None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.process.wait()


class Queue:
    """The commands of a file and their logs.

    Args:
        jobs: the commands.
        logs: folder for outputs, summary and collected files.
        at_once: number of commands side by side.
    """

    def __init__(self, jobs: Sequence[Job], logs: Path, at_once: int) -> None:
        self.jobs, self.logs, self.at_once = jobs, logs, at_once
        self.record = logs / "ended.json"
        ended = set(json.loads(self.record.read_text())) if self.record.exists() else set()
        for job in jobs:
            if job.text in ended:
                job.state = "ended"

    def log(self, job: Job) -> Path:
        """Return the file for the output of a command."""
        return self.logs / f"{job.number:03d}.txt"

    def running(self) -> list[Job]:
        """Return the running commands."""
        return [job for job in self.jobs if job.state == "running"]

    def startable(self) -> Iterator[Job]:
        """Yield the waiting commands whose turn it is."""
        for job in self.jobs:
            if job.state == "waiting" and all(
                other.state == "ended" for other in self.jobs if other.stage < job.stage
            ):
                yield job

    def run(self, seconds: float, grace: float) -> None:
        """Run the commands until all have ended or the time is over."""
        deadline = time.monotonic() + seconds
        stopping = self._watch_signals()
        while not stopping and time.monotonic() < deadline:
            for job in self.startable():
                if len(self.running()) < self.at_once:
                    job.start(self.log(job))
                    self.note(job)
            if not self.running():
                return
            self._settle(False)
            time.sleep(0.1)
        for job in self.running():
            assert job.process is not None
            job.process.terminate()
        deadline = time.monotonic() + grace
        while self.running() and time.monotonic() < deadline:
            self._settle(True)
            time.sleep(0.1)
        for job in self.running():
            job.kill()
            job.state = "killed"
            self.note(job)

    def _watch_signals(self) -> list[int]:
        """Return a list that gets the number of a signal to stop."""
        found: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: found.append(received))
        return found

    def _settle(self, stopping: bool) -> None:
        for job in self.running():
            if not job.poll(stopping):
                self.note(job)

    def note(self, job: Job) -> None:
        """Print the state of a command, and write the record and the summary."""
        after = "" if job.state == "running" else f" after {job.seconds:.0f} s: {self.last(job)}"
        line = f"{time.strftime('%H:%M:%S')} {job.number:03d} {job.state}{after}"
        print(escape_line(line), flush=True)
        _write(self.record, json.dumps([each.text for each in self.jobs if each.state == "ended"]))
        _write(self.logs / "summary.md", self.summary())

    def last(self, job: Job) -> str:
        """Return the last line of the output."""
        if not self.log(job).exists():
            return ""
        with self.log(job).open("rb") as file:
            file.seek(max(0, self.log(job).stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def summary(self) -> str:
        """Return a table of all commands."""
        lines = ["| | state | code | s | command | last line |", "| --- |" + " --- |" * 5]
        for job in self.jobs:
            code = "" if job.code is None else job.code
            cells = [f"{job.number:03d}", job.state, code, f"{job.seconds:.0f}", job.text]
            cells = [escape_line(str(cell)).replace("|", "/") for cell in (*cells, self.last(job))]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines) + "\n"


def read_jobs(path: Path) -> list[Job]:
    """Read the commands of a file."""
    jobs: list[Job] = []
    stage = 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise SystemExit(f"{path}, line {number}: {error}") from None
        if words == [WAIT]:
            stage += 1
        elif words:
            jobs.append(Job(len(jobs) + 1, words, stage))
    if not jobs:
        raise SystemExit(f"{path} has no command; write one on each line")
    return jobs


def collect(logs: Path, patterns: Sequence[str], runs: Sequence[str], piece: int) -> list[Path]:
    """Write files, folders and packed weights of runs into an archive; return its pieces."""
    for old in logs.glob("collected.tgz*"):
        old.unlink()
    found = [path for pattern in patterns for path in _find(pattern)]
    for run in (path for pattern in runs for path in _find(pattern)):
        target = logs / "packed" / f"{run.name}.safetensors"
        if (run / "weights.safetensors").exists():
            try:
                pack(run, target)
            except (PaleError, OSError) as error:
                print(escape_line(f"{run} is not packed: {error}"), flush=True)
                continue
            found.append(target)
    if not found:
        return []
    archive = logs / "collected.tgz"
    with tarfile.open(archive, "w:gz", compresslevel=1) as tar:
        for path in dict.fromkeys(found):
            tar.add(path, arcname=str(path).lstrip("/"))
    pieces: list[Path] = []
    piece = min(piece, archive.stat().st_size)  # `read` allocates as much as it is asked for
    with archive.open("rb") as file:
        while content := file.read(piece):
            pieces.append(archive.with_name(f"{archive.name}.{len(pieces):02d}"))
            pieces[-1].write_bytes(content)
    archive.unlink()
    return pieces


def _find(pattern: str) -> list[Path]:
    return [Path(name) for name in sorted(glob.glob(pattern))]


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the queue, collect, and print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="JOBS")
    parser.add_argument("logs", type=Path, metavar="LOGS")
    parser.add_argument("--minutes", type=float, default=1e6, help="time until the soft stop")
    parser.add_argument("--grace", type=float, default=60, help="seconds to save (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="commands side by side")
    parser.add_argument("--collect", nargs="+", default=(), metavar="GLOB", help="files, folders")
    parser.add_argument("--pack", nargs="+", default=(), metavar="GLOB", help="run folders")
    parser.add_argument("--piece-mb", type=float, default=1e6, help="size of a piece, 10^6 bytes")
    args = parser.parse_args(argv)
    args.logs.mkdir(parents=True, exist_ok=True)
    queue = Queue(read_jobs(args.file), args.logs, args.jobs)
    queue.run(60 * args.minutes, args.grace)
    pieces = collect(args.logs, args.collect, args.pack, int(1e6 * args.piece_mb))
    _write(args.logs / "summary.md", queue.summary())
    for path in pieces:
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    print(queue.summary(), end="")
    if bad := [job.number for job in queue.jobs if job.state in ("failed", "killed")]:
        raise SystemExit(f"failed or killed: {', '.join(map(str, bad))}")


if __name__ == "__main__":
    main()
