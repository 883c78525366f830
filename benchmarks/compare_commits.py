"""Compare the speed of two source trees of this package in one run, with timm's Swin-T as the control.

    git archive 3e4aa7c src | tar x -C OLD
    python benchmarks/compare_commits.py OLD/src src --json OUT/compare_commits.json \\
        --old-commit 3e4aa7c --new-commit "$(git rev-parse --short HEAD)"

Each tree runs in a worker process that measures Pale-T of that tree and the control, in turns. The two workers are
asked in turns too, in the other order in every round, and only one of them uses the GPU at a time. All steps are built,
recorded and timed by this file, with the public names that both trees have. Random data; weights in bf16 for inference,
autocast to bf16 for training (forward and backward pass without optimizer), no stochastic depth.

Before the measurement, other processes compile the kernels and share their caches with the workers. The control is
compiled once, and both workers run the same code of it. Nothing else runs while times are measured.

A tree's ratio is the time of the control over the time of Pale-T, both medians over rounds: larger is faster. The
result of a case is the ratio of the new tree over that of the old tree, which may be at most 2 % below 1 with CUDA
graphs and 5 % without. A case that fails is a row with its error. Writes the JSON file and a table beside it (.md).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import queue
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

Step = Callable[[], object]
Key = tuple[str, str, int]  # role ("pale" or "control"), mode, batch

LIMITS = {True: 0.02, False: 0.05}  # with and without CUDA graphs
WARMUP_CALLS = 3
MIN_ROUNDS = 4
ANSWER_SECONDS = 300  # a worker without an answer after this time has failed
EXIT_SECONDS = 5
COMPILE_THREADS = 4  # of torch.compile in each process


@dataclass(frozen=True)
class Case:
    """A comparison.

    Attributes:
        name: first column of the table.
        pale: mode of the Pale model ("infer", "compiled", "optimized", "train", "train compiled").
        control: mode of the control.
        graph: whether each step is recorded as one CUDA graph.
        calls: timed calls of each model in a turn.
        single: whether the batch size is 1.
    """

    name: str
    pale: str
    control: str
    graph: bool = False
    calls: int = 4
    single: bool = False

    def keys(self, batch: int) -> tuple[Key, Key]:
        """Return the steps of the Pale model and of the control."""
        batch = 1 if self.single else batch
        return ("pale", self.pale, batch), ("control", self.control, batch)


CASES = {
    case.name: case
    for case in (
        Case("inference eager", "infer", "infer"),
        Case("inference compiled", "compiled", "compiled"),
        Case("inference optimized", "optimized", "compiled"),
        Case("inference compiled graph", "compiled", "compiled", graph=True),
        Case("inference optimized graph", "optimized", "compiled", graph=True),
        Case("training eager", "train", "train", calls=2),
        Case("training graph", "train", "train", graph=True, calls=2),
        Case("latency graph", "optimized", "compiled", graph=True, calls=30, single=True),
        # Not measured by default: compiling it takes another minute.
        Case("training compiled graph", "train compiled", "train compiled", graph=True, calls=2),
    )
}
DEFAULT_CASES = tuple(CASES)[:-1]


# The worker.


class Bench:
    """Steps of a tree, built when they are first needed; torch and the tree are imported here only."""

    def __init__(self, options: dict[str, Any]) -> None:
        import timm
        import torch

        import pale

        if not Path(pale.__file__).is_relative_to(options["source"]):
            raise ImportError(f"pale must come from {options['source']}, got {pale.__file__}")
        self.torch, self.timm, self.pale, self.options = torch, timm, pale, options
        self.steps: dict[Key, Step] = {}
        self.opened: dict[str, Step] = {}

    def about(self) -> dict[str, Any]:
        """Return hardware and versions."""
        torch, cuda = self.torch, self.options["device"] == "cuda"
        try:
            from triton import __version__ as triton
        except ImportError:
            triton = None
        return {
            "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton,
            "timm": self.timm.__version__,
            "pale": self.pale.__version__,
            "source": str(Path(self.pale.__file__).parent),
        }

    def prepare(self, key: list[Any]) -> float:
        """Build and warm up a step, and return the seconds that it took."""
        begin = time.monotonic()
        self._step(tuple(key))
        return time.monotonic() - begin

    def open(self, case: str) -> None:
        """Make the steps of a case ready, as CUDA graphs where it says so."""
        for role, key in zip(
            ("pale", "control"), CASES[case].keys(self.options["batch"]), strict=True
        ):
            step = self._step(key)
            step()  # it may have fitted into memory only without the others
            self.opened[role] = record_cuda_graph(step) if CASES[case].graph else step
        self._synchronize()
        gc.collect()
        gc.freeze()  # a collection during the measurement looks at little

    def measure(self, case: str) -> dict[str, float]:
        """Return the median time of each model in ms, called in turns."""
        times: dict[str, list[float]] = {role: [] for role in self.opened}
        for n in range(1 + CASES[case].calls):
            for role, step in self.opened.items():
                ms = time_call(step, self.options["device"])
                if n:  # the first calls only bring the GPU back to this process
                    times[role].append(ms)
        self._synchronize()
        return {role: statistics.median(values) for role, values in times.items()}

    def close(self) -> None:
        """Free the graphs of a case and the cached memory."""
        self.opened.clear()
        gc.unfreeze()
        gc.collect()
        if self.options["device"] == "cuda":
            self.torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.options["device"] == "cuda":
            self.torch.cuda.synchronize()

    def _step(self, key: Key) -> Step:
        if key not in self.steps:
            role, mode, _ = key
            # The control has one cache for both trees, a tree its own: a graph's key does not contain our operators.
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = self.options["caches"][role]
            step = self._build(role, mode, key[2])
            for _ in range(WARMUP_CALLS):
                step()
            self._synchronize()
            self.steps[key] = step
        return self.steps[key]

    def _build(self, role: str, mode: str, batch: int) -> Step:
        torch, device, size = self.torch, self.options["device"], self.options["size"]
        torch.manual_seed(0)
        model = self.timm.create_model(self.options["models"][role], img_size=size)
        for part in model.modules():
            if isinstance(part, self.timm.layers.DropPath):
                part.drop_prob = 0.0
        x = torch.randn(batch, 3, size, size, device=device)
        training = mode.startswith("train")
        model = model.to(device).train(training)
        if not training:
            x = x.bfloat16()
            model = self.pale.optimize(model) if mode == "optimized" else model.bfloat16()
        call = torch.compile(model, dynamic=False) if "compiled" in mode else model

        def infer() -> None:
            with torch.inference_mode():
                call(x)

        def train() -> None:
            with torch.autocast(device, torch.bfloat16):
                loss = call(x).float().square().mean()
            loss.backward()
            model.zero_grad(set_to_none=True)

        return train if training else infer


def time_call(step: Step, device: str) -> float:
    """Return the time of one call in ms."""
    if device != "cuda":
        begin = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - begin)
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def record_cuda_graph(step: Step) -> Step:
    """Return the step as one CUDA graph; weights and images are kept alive by the steps of the worker."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return graph.replay


def work(options: dict[str, Any]) -> None:
    """Answer the commands on stdin, one JSON line each, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    bench = None
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            bench = bench or Bench(options)
            answer = {"result": getattr(bench, name)(*arguments)}
        except Exception as error:  # a case may fail in any way; its row has the error
            answer = {"error": shorten(f"{type(error).__name__}: {error}", 600)}
            if bench is not None:
                bench.close()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# The parent.


class FailedError(Exception):
    """A command failed in a worker; the text is the error there."""


class Worker:
    """A process that measures one tree."""

    def __init__(self, source: Path, options: dict[str, Any]) -> None:
        paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TRITON_CACHE_DIR": options["caches"]["triton"],
            "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS),
        }
        given = json.dumps(options | {"source": str(source)})
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--worker", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, name: str, *arguments: object) -> Any:
        """Return the result of a method of `Bench` in the worker."""
        try:
            self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=ANSWER_SECONDS)
        except (OSError, ValueError):
            line = ""
        except queue.Empty:
            self.process.kill()
            raise FailedError(f"no answer to {name} within {ANSWER_SECONDS} s") from None
        if not line:
            raise FailedError(f"the worker ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise FailedError(answer["error"])
        return answer["result"]

    def end(self) -> None:
        """End the process, which exits when it has no more commands."""
        try:
            self.process.stdin.close()
            self.process.wait(EXIT_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


@contextmanager
def started(source: Path, options: dict[str, Any]) -> Iterator[Worker]:
    """Yield a worker that ends with the context."""
    worker = Worker(source, options)
    try:
        yield worker
    finally:
        worker.end()


class Comparison:
    """The whole run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.begin = args, time.monotonic()
        self.sources = {"old": args.old.resolve(), "new": args.new.resolve()}
        self.cases = [CASES[name] for name in args.cases]
        self.rows: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {}

    def report(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.monotonic() - self.begin:6.1f} s] {text}", flush=True)

    def options(self, tree: str, cache: Path) -> dict[str, Any]:
        """Return what a worker needs to know."""
        caches = {"pale": cache / tree, "control": cache / "control", "triton": cache / "triton"}
        return {
            "device": self.args.device,
            "size": self.args.size,
            "batch": self.args.batch,
            "models": {"pale": self.args.model, "control": self.args.control},
            "caches": {name: str(path) for name, path in caches.items()},
        }

    def run(self) -> None:
        """Compile, measure all cases and write the result after each."""
        with ExitStack() as stack:
            cache = self.args.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cache = cache.resolve()
            workers = {
                tree: stack.enter_context(started(source, self.options(tree, cache)))
                for tree, source in self.sources.items()
            }
            self.compile(workers, cache)
            for number, case in enumerate(self.cases):
                left = self.args.limit - (time.monotonic() - self.begin)
                self.rows.append(self.compare(case, workers, left / (len(self.cases) - number)))
                self.report(f"{case.name}: {brief(self.rows[-1])}")
                write(self.args.json, self.result())

    def compile(self, workers: dict[str, Worker], cache: Path) -> None:
        """Prepare all steps in both workers, the slow ones first in several processes."""
        keys = list(dict.fromkeys(key for case in self.cases for key in case.keys(self.args.batch)))
        controls = [key for key in keys if key[0] == "control" and "compiled" in key[1]]
        slow = [key for key in keys if key[0] == "pale" and "compiled" in key[1]]
        others = [key for key in keys if key not in controls + slow]
        helpers: list[tuple[str, list[Key]]] = []
        if self.args.device == "cuda":
            helpers = [("old", slow)]
            for tree in self.sources:
                modes = dict.fromkeys(key[1] for key in others if key[0] == "pale")
                helpers += [(tree, [k for k in others if k[:2] == ("pale", m)]) for m in modes]
            helpers = [(tree, group) for tree, group in helpers if group]
        self.report(f"compiling in {len(helpers) + 2} processes")
        with ThreadPoolExecutor(len(helpers) + 2) as pool:
            futures = [pool.submit(self.help, tree, group, cache) for tree, group in helpers]
            # The control is compiled by one worker; the other finds its code in the cache.
            futures.append(pool.submit(self.prepare, workers["old"], "old tree", controls))
            futures.append(pool.submit(self.prepare, workers["new"], "new tree", slow))
            for future in futures:
                future.result()
        self.report("compiled; both workers prepare the remaining steps")
        with ThreadPoolExecutor() as pool:
            first = pool.submit(self.prepare, workers["old"], "old tree", slow + others)
            second = pool.submit(self.prepare, workers["new"], "new tree", controls + others)
            for future in (first, second):
                future.result()
        for tree, worker in workers.items():
            try:
                self.about[tree] = worker.ask("about")
                worker.ask("close")
            except FailedError as error:
                self.about[tree] = {"error": str(error)}
        self.report("both workers are ready")

    def help(self, tree: str, keys: list[Key], cache: Path) -> None:
        """Prepare steps in a process of its own, which leaves its kernels in the caches."""
        with started(self.sources[tree], self.options(tree, cache)) as worker:
            self.prepare(worker, f"{tree} tree, helper", keys)

    def prepare(self, worker: Worker, name: str, keys: list[Key]) -> None:
        """Prepare steps in a worker; a step that fails is built again, and fails again, in its case."""
        for key in keys:
            what = f"{name}: {key[0]} {key[1]}, batch {key[2]}"
            try:
                self.report(f"{what}: {worker.ask('prepare', key):.1f} s")
            except FailedError as error:
                self.report(f"{what}: failed, {error}")

    def compare(self, case: Case, workers: dict[str, Worker], seconds: float) -> dict[str, Any]:
        """Return the row of a case."""
        errors: dict[str, str] = {}
        turns: dict[str, list[dict[str, float]]] = {tree: [] for tree in workers}

        def ask(tree: str, name: str, *arguments: object) -> Any:
            try:
                return workers[tree].ask(name, *arguments)
            except FailedError as error:
                errors.setdefault(tree, str(error))
                return None

        order = list(workers)
        for tree in order:
            ask(tree, "open", case.name)
        end = time.monotonic() + seconds
        for n in range(self.args.rounds):
            if errors or (n >= MIN_ROUNDS and time.monotonic() > end):
                break
            for tree in order:
                if (measured := ask(tree, "measure", case.name)) is not None:
                    turns[tree].append(measured)
            order.reverse()
        for tree in order:
            ask(tree, "close")
        return summarize(case, turns, errors)

    def result(self) -> dict[str, Any]:
        """Return everything that is written."""
        args = self.args
        return {
            "about": self.about,
            "commits": {"old": args.old_commit, "new": args.new_commit},
            "command": shlex.join(["python", *sys.argv]),
            "date": time.strftime("%Y-%m-%d"),
            "setting": {
                "device": args.device,
                "size": args.size,
                "batch": args.batch,
                "model": args.model,
                "control": args.control,
            },
            "seconds": round(time.monotonic() - self.begin, 1),
            "rows": self.rows,
        }


def summarize(
    case: Case, turns: dict[str, list[dict[str, float]]], errors: dict[str, str]
) -> dict[str, Any]:
    """Return medians over the rounds and their ratios, or the errors."""
    row: dict[str, Any] = {"case": case.name, "limit": LIMITS[case.graph], "about": asdict(case)}
    if errors:
        return row | {"errors": errors}
    for tree, measured in turns.items():
        ms = {role: statistics.median(t[role] for t in measured) for role in ("pale", "control")}
        row[tree] = ms | {"ratio": ms["control"] / ms["pale"]}
    by_round = [
        (new["control"] / new["pale"]) / (old["control"] / old["pale"])
        for old, new in zip(turns["old"], turns["new"], strict=True)
    ]
    change = row["new"]["ratio"] / row["old"]["ratio"]
    return row | {
        "rounds": len(by_round),
        "new_over_old": change,
        "quartiles": quartiles(by_round),
        "without_control": row["old"]["pale"] / row["new"]["pale"],
        "within_limit": change >= 1 - row["limit"],
        "turns": turns,
    }


def quartiles(values: list[float]) -> list[float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return 2 * values
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def brief(row: dict[str, Any]) -> str:
    """Return a row as one line of progress."""
    if "errors" in row:
        return "failed, " + "; ".join(f"{tree}: {text}" for tree, text in row["errors"].items())
    return f"new / old {row['new_over_old']:.3f} in {row['rounds']} rounds"


def table(result: dict[str, Any]) -> str:
    """Return the page."""
    setting, commits = result["setting"], result["commits"]
    about = next((a for a in result["about"].values() if "error" not in a), {})
    versions = ", ".join(f"{name} {about.get(name)}" for name in ("torch", "triton", "timm"))
    lines = [
        "# Speed of two commits",
        "",
        f"{result['date']}, {about.get('hardware')}, {versions}, Python {about.get('python')}; old commit "
        f"{commits['old']}, new commit {commits['new']}. {setting['model']} and {setting['control']}, "
        f"{setting['size']} px, batch {setting['batch']} (latency: 1), bf16. Medians in ms; ratio: time of the control "
        "over time of Pale in the same process; new / old: of these ratios (quartiles over rounds), above 1 is faster. "
        "Pale alone: old time over new time. At most 2 % slower with CUDA graphs and 5 % without.",
        "",
        f"`{result['command']}`",
        "",
        "| case | old: Pale | control | ratio | new: Pale | control | ratio | new / old | Pale alone | limit | kept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        if "errors" in row:
            text = "; ".join(f"{tree}: {error}" for tree, error in row["errors"].items())
            lines.append(f"| {row['case']} | failed: {text.replace('|', '/')} " + "| " * 9 + "|")
            continue
        cells = [row["case"]]
        for tree in ("old", "new"):
            found = row[tree]
            cells += [f"{found['pale']:.3f}", f"{found['control']:.3f}", f"{found['ratio']:.3f}"]
        low, high = row["quartiles"]
        cells += [
            f"**{row['new_over_old']:.3f}** ({low:.3f} to {high:.3f})",
            f"{row['without_control']:.3f}",
            f"{row['limit']:.0%}",
            "yes" if row["within_limit"] else "**no**",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def write(path: Path, result: dict[str, Any]) -> None:
    """Write the result so far, as JSON and as a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(result))


def parse() -> argparse.Namespace:
    """Return the checked arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder that holds the old package `pale`")
    parser.add_argument("new", type=Path, help="folder that holds the new package `pale`")
    parser.add_argument("--json", type=Path, required=True, help="result; the table is beside it")
    parser.add_argument("--old-commit", default="unknown")
    parser.add_argument("--new-commit", default="unknown")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=12, help="at most; at least 4 in any time")
    parser.add_argument(
        "--limit", type=float, default=140, help="seconds of the whole run, kept by fewer rounds"
    )
    parser.add_argument("--model", default="pale_tiny")
    parser.add_argument("--control", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--cache", type=Path, help="keep compiled kernels here for another run")
    parser.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    args = parser.parse_args()
    for source in (args.old, args.new):
        if not (source / "pale" / "__init__.py").is_file():
            parser.error(f"{source} must be a folder that holds the package pale; it has none")
    if min(args.batch, args.size, args.rounds) < 1:
        parser.error("batch, size and rounds must be at least 1")
    args.cases = args.cases or DEFAULT_CASES
    if args.device == "cpu":
        args.cases = [name for name in args.cases if not CASES[name].graph]
    if not args.cases:
        parser.error("no case is left; CUDA graphs need --device cuda")
    return args


def main() -> None:
    """Run the comparison and print the table."""
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
        return
    comparison = Comparison(parse())
    comparison.run()
    result = comparison.result()
    write(comparison.args.json, result)
    print("\n" + table(result))
    if any("errors" in row for row in result["rows"]):
        raise SystemExit("some cases failed; the table has their errors")


if __name__ == "__main__":
    main()
