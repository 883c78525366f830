"""Shared by the scripts here: resumable training runs, several at once, and reading their results."""

import argparse
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageDraw

from pale.train.distributed import join
from pale.train.environment import environment
from pale.train.log import read

COLOURS = ["#0a7", "#c50", "#37c", "#a3a", "#888", "#970", "#0aa", "#c07", "#000"]
SIGNALLED = {130, 143, -2, -15}  # left by Ctrl-C or SIGTERM, saved or not

_stop = (
    threading.Event()
)  # set when the script exits: no run starts any more, running ones are terminated
_locks: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)
_guard = threading.Lock()


class StoppedError(Exception):
    """A run was stopped after saving, or was not started."""


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all scripts that train a list of runs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--workers", type=int, default=14, help="data loading processes of each run"
    )
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this time")
    add_jobs(parser)
    return parser


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add the option for several runs at once."""

    def count(text: str) -> int:
        if not text.isdecimal() or not int(text):
            raise argparse.ArgumentTypeError(f"a number of runs from 1, got {text}")
        return int(text)

    text = "runs at once; with 2 or more, output goes to RUN.txt and speeds are not reported"
    parser.add_argument("--jobs", type=count, default=1, metavar="N", help=text)


def pale(
    *words: object, run: Path | None = None, jobs: int = 1, deadline: float = float("inf")
) -> None:
    """Run a `pale` command; with several jobs its output goes to a file beside the run."""
    if _stop.is_set():
        raise StoppedError("not started")
    command = [sys.executable, "-m", "pale", *map(str, words)]
    if run is None or jobs == 1:
        print("+ pale", *words, flush=True)
        code = waited(subprocess.Popen(command), deadline)
    else:
        log, began = output(run), time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        print_line(f"{run.name}: {words[0]} starts, output in {log}")
        with log.open("a") as file:
            print(f"+ {jobs} at once: pale", *words, file=file, flush=True)
            child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            how = "is stopped"
            try:
                code = waited(child, deadline)
                how = f"fails with exit code {code}" if code else "ends"
            finally:
                seconds = time.monotonic() - began
                print_line(f"{run.name}: {words[0]} {how} after {seconds:.0f} s")
    if code:
        raise subprocess.CalledProcessError(code, command)


def waited(child: subprocess.Popen, deadline: float) -> int:
    """Return the exit code of a child; terminate it at the deadline or when the script exits (it then saves)."""
    try:
        while child.poll() is None and time.monotonic() < deadline:
            if _stop.wait(0.1):
                break
        # Ctrl-C reaches the child too, which may exit before this process.
        if child.poll() is None or child.returncode in SIGNALLED:
            raise StoppedError("stopped; run it again to resume")
        return child.returncode
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()


def print_line(text: str) -> None:
    """Print a line without mixing it with the output of other threads."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def output(run: Path) -> Path:
    """Return the file for the output of a run with several jobs."""
    return run.with_name(f"{run.name}.txt")


def jobs_of(run: Path) -> int:
    """Return the largest number of jobs during this run."""
    if not output(run).is_file():
        return 1
    found = re.findall(r"^\+ (\d+) at once: pale train", output(run).read_text(), re.MULTILINE)
    return max(map(int, found), default=1)


@contextmanager
def pool(jobs: int) -> Iterator[Executor]:
    """Yield threads that wait for children; an error or a signal stops all of them and starts no more."""
    with ThreadPoolExecutor(jobs) as executor:
        try:
            yield executor
        except BaseException:
            _stop.set()
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def stoppable() -> None:
    """Let SIGTERM end the script and its runs, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))


def made(
    args: argparse.Namespace,
    plan: Sequence[tuple],
    make: Callable[..., dict],
    report: Callable[[list[dict]], str],
) -> None:
    """Compute the row of every item of a plan, `args.jobs` at once; start none after `args.minutes`.

    Whenever one is done, `report` gets those so far in the order of the plan; what it returns last is printed. Where
    one fails the others go on, and the script ends with the names of those that failed.
    """
    deadline = time.monotonic() + 60 * args.minutes
    rows: dict[tuple, dict] = {}
    failed, table = [], ""
    args.out.mkdir(parents=True, exist_ok=True)
    stoppable()

    def name(item: tuple) -> str:
        return " ".join(map(str, item))

    def one(item: tuple) -> dict | None:
        if time.monotonic() > deadline:
            print_line(f"time is up before {name(item)}")
            return None
        return make(args, *item)

    with pool(args.jobs) as executor:
        futures = {executor.submit(one, item): item for item in plan}
        for future in as_completed(futures):
            item = futures[future]
            try:
                row = future.result()
            except (subprocess.CalledProcessError, StoppedError) as error:
                code = getattr(error, "returncode", None)
                print_line(f"{name(item)} failed: {error if code is None else f'exit code {code}'}")
                failed.append(item)
                continue
            if row is not None:
                rows[item] = row
                table = report([rows[i] for i in plan if i in rows])
    print(table)
    if failed:
        raise SystemExit(f"failed: {', '.join(name(item) for item in plan if item in failed)}")


def done(run: Path) -> bool:
    return any(event["event"] == "end" for event in read(run / "log.jsonl"))


def alone(run: Path) -> threading.Lock:
    """Who holds this is the only one to make the run."""
    with _guard:
        return _locks[run.resolve()]


def trained(run: Path, *words: object, jobs: int = 1) -> Path:
    """Train, or go on, or leave as it is; who asks for the same run meanwhile waits for it."""
    with alone(run):
        if done(run):
            return run
        if list((run / "checkpoints").glob("step_*")):
            pale("train", "--resume", run, run=run, jobs=jobs)
        else:
            shutil.rmtree(run, ignore_errors=True)
            output(run).unlink(missing_ok=True)
            pale("train", *words, "--output", run, run=run, jobs=jobs)
    return run


def summary(run: Path) -> dict:
    """Return the last evaluation and facts of the run; with several jobs, speeds mean little."""
    events = read(run / "log.jsonl")
    start, steps, evals = (
        [e for e in events if e["event"] == k] for k in ("start", "step", "eval")
    )
    return {
        "run": run.name,
        "val": evals[-1],
        "device": start[-1]["device"],
        "steps": steps[-1]["step"],
        "jobs": jobs_of(run),
        "images_per_s": statistics.median(e["images_per_s"] for e in steps[len(steps) // 2 :]),
        "data_wait": statistics.median(e["data_wait"] for e in steps[len(steps) // 2 :]),
        "memory_mb": steps[-1]["memory_mb"],
    }


def losses(run: Path) -> list[tuple[int, float]]:
    """Steps and their training losses."""
    events = read(run / "log.jsonl")
    return [(e["step"], e["loss"]) for e in events if e["event"] == "step"]


def about(args: argparse.Namespace) -> dict:
    """Versions, commit, hardware, and the arguments."""
    with join() as world:
        return {
            "environment": environment(world),
            "arguments": {name: str(value) for name, value in vars(args).items()},
        }


def mean(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def speeds(rows: list[dict]) -> list[dict]:
    """Return the rows that were measured with one job; old rows without the key are among them."""
    return [row for row in rows if row.get("jobs", 1) == 1]


def strips(lines: list[tuple[str, list[tuple[Image.Image | None, str]]]], path: Path) -> None:
    """Save rows of images below each other; each row has a title, each image a caption."""
    if not lines:
        return
    wide, high = 170, 150
    columns = max(len(images) for _, images in lines)
    canvas = Image.new("RGB", (wide * max(columns, 1), high * len(lines)), "white")
    pen = ImageDraw.Draw(canvas)
    for i, (title, images) in enumerate(lines):
        pen.text((4, high * i + 2), title, fill="black")
        for k, (image, caption) in enumerate(images):
            if image is not None:
                image.thumbnail((wide - 6, high - 38))
                canvas.paste(image, (wide * k, high * i + 18))
            pen.text((wide * k + 4, high * i + high - 16), caption, fill="black")
    canvas.save(path)


def ends(entries: list, columns: int = 6) -> list:
    """Return the first and the last entries of a gallery: the best and the worst."""
    half = columns // 2
    return entries if len(entries) <= columns else entries[:half] + entries[-half:]


def curves(out: Path, rows: list[dict], path: Path) -> None:
    """Plot the training loss of every run over its steps, one panel per task."""
    w, h, tasks = 560, 320, sorted({row["task"] for row in rows})
    models = list(dict.fromkeys(row["model"] for row in rows))
    colours = {model: COLOURS[i % len(COLOURS)] for i, model in enumerate(models)}
    canvas = Image.new("RGB", (w * len(tasks), h), "white")
    draw = ImageDraw.Draw(canvas)
    for i, task in enumerate(tasks):
        left, lines = i * w, []
        for row in (r for r in rows if r["task"] == task):
            steps = losses(out / row["run"])
            # Losses of mixed and plain batches differ: average over a twentieth of the run.
            size = max(1, len(steps) // 20)
            ends = range(size, len(steps) + 1, max(1, size // 3))
            pieces = [steps[k - size : k] for k in ends]
            points = [(p[-1][0], statistics.mean(loss for _, loss in p)) for p in pieces]
            lines.append((row["model"], points))
        top = max(y for _, points in lines for _, y in points[1:] or points)
        end = max(points[-1][0] for _, points in lines)
        draw.rectangle((left + 40, 24, left + w - 12, h - 28), outline="#bbb")
        title = f"{task}: training loss, 0 to {top:.2f}, over {end} steps"
        draw.text((left + 44, 6), title, fill="black")
        for k, model in enumerate(dict.fromkeys(model for model, _ in lines)):
            draw.text((left + w - 140, 30 + 14 * k), model, fill=colours[model])
        for model, points in lines:
            place = [
                (left + 40 + (w - 52) * x / end, h - 28 - (h - 52) * min(y, top) / top)
                for x, y in points
            ]
            draw.line(place, fill=colours[model], width=2)
    canvas.save(path)


def write(out: Path, name: str, args: argparse.Namespace, rows: list[dict], table: str) -> None:
    """Write the results so far, as JSON and as a table."""
    out.mkdir(parents=True, exist_ok=True)
    report = about(args) | {"rows": rows}
    (out / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / f"{name}.md").write_text(table)
