"""Hostile files against the commands, and hostile uploads against a running server.

    python benchmarks/hostile.py --cases 1000 --uploads 1000 -o benchmarks/results/hostile

Every case is one command on generated files, in a process of its own (a fork of one that has imported the package):
images, masks, annotations, archives, lists, parts, recipes, run folders and weights that are damaged, oversized or made
to attack (`hostile_files.py`). Counted are tracebacks, cases that take longer than --seconds, deaths by a signal, and
the peak memory. The server gets the images as uploads on every task, a quarter of them as requests of the Open
Inference Protocol; counted are answers of 5xx, requests without an answer and peak memory.
Writes OUT.json and OUT.md with versions, commit and command; the files of cases that failed stay in --work.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from hostile_files import command, hostile_image, hostile_infer
from safetensors import safe_open

from pale.cli.main import main as cli
from pale.serve.limits import Limits
from pale.train.distributed import join
from pale.train.environment import environment
from pale.weights.zoo.index import FOLDER as FILES

WAIT = 10  # a case may take so many times its CPU time, for it may run beside others


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process so far."""
    values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def executed(words: list[str], seconds: float) -> dict:
    """Run a command in a fork; return how it ended."""
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(read)
        for number in (1, 2):
            os.dup2(write, number)
        code = 70
        try:
            sys.argv = ["pale", *words]
            code = cli(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)
    os.close(write)
    os.set_blocking(read, False)
    output, killed = b"", False
    while True:
        with contextlib.suppress(BlockingIOError):
            output = (output + os.read(read, 1 << 20))[-1_000_000:]
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        if cpu_seconds(child) > seconds or time.monotonic() - began > WAIT * seconds:
            os.kill(child, signal.SIGKILL)
            killed = True
        time.sleep(0.01)
    with contextlib.suppress(BlockingIOError):
        output += os.read(read, 1 << 20)
    os.close(read)
    return {
        "command": " ".join(words[: 2 if words[0] in ("data", "view") else 1]),
        "code": os.waitstatus_to_exitcode(status),
        "seconds": usage.ru_utime + usage.ru_stime,
        "hang": killed,
        "traceback": b"Traceback (most recent call last)" in output,
        "escape": b"\x1b]0;" in output,
        "peak_mb": usage.ru_maxrss / 1024,
        "output": output[-1500:].decode(errors="replace"),
        "words": words,
    }


def files(args: argparse.Namespace) -> dict:
    """Run all cases; return the counts, and keep the folders of those that failed."""
    with safe_open(FILES / "classify_pets.safetensors", "np") as opened:
        recipe = json.loads(opened.metadata()["pale"])["recipe"]
    cases, failed = [], []
    for i in range(args.first, args.first + args.cases):
        folder = args.work / str(i)
        words = command(random.Random(i), folder, recipe)
        count = sum(not path.is_dir() for path in folder.rglob("*"))
        case = executed(words, args.seconds) | {"case": i, "files": count}
        cases.append(case)
        bad = case["traceback"] or case["hang"] or case["code"] < 0 or case["escape"]
        if bad or case["peak_mb"] > args.memory_mb:
            failed.append(case)
            flags = {k: v for k, v in case.items() if k not in ("output", "words")}
            print(f"{flags}\n{shlex.join(case['words'])}\n{case['output'][-600:]}", flush=True)
        else:
            subprocess.run(["rm", "-rf", folder], check=True)
    return {
        "cases": len(cases),
        "files": sum(case["files"] for case in cases),
        "commands": dict(Counter(case["command"] for case in cases)),
        "exit_codes": dict(Counter(str(case["code"]) for case in cases)),
        "tracebacks": sum(case["traceback"] for case in cases),
        "hangs": sum(case["hang"] for case in cases),
        "signals": sum(case["code"] < 0 and not case["hang"] for case in cases),
        "raw_escapes": sum(case["escape"] for case in cases),
        "longest_s": max(case["seconds"] for case in cases),
        "peak_mb": max(case["peak_mb"] for case in cases),
        "base_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "bound_mb": args.memory_mb,
        "limit_s": args.seconds,
        "failed": failed,
    }


def uploads(args: argparse.Namespace) -> dict:
    """Send hostile images to a server on every task; return the counts."""
    words = [sys.executable, "-m", "pale", "serve", "--json", "--device", "cpu", "--port", "0"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        about = json.loads(server.stdout.readline())
        status = Path(f"/proc/{server.pid}/status")

        def memory(name: str) -> float:
            line = next(x for x in status.read_text().splitlines() if x.startswith(name))
            return int(line.split()[1]) / 1024

        idle, found, longest = memory("VmRSS"), Counter(), 0.0
        with httpx.Client(base_url=about["url"], timeout=60, trust_env=False) as client:
            listed = client.post("/v2/repository/index").raise_for_status().json()
            names = [each["name"] for each in listed]
            for i in range(args.uploads):
                draw = random.Random(f"upload {i}")
                task = draw.choice(["classification", "segmentation", "detection"])
                path = f"/predict/{task}" + draw.choice(["", "?output=drawn"])
                began = time.monotonic()
                body, headers = hostile_image(draw), {}
                if i % 4 == 0:
                    model = draw.choice(names)
                    path = f"/v2/models/{model}/infer"
                    body, headers = hostile_infer(draw)
                try:
                    answer = client.post(path, content=body, headers=headers)
                    found[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    found[type(error).__name__] += 1
                longest = max(longest, time.monotonic() - began)
            client.get("/health").raise_for_status()
        return {
            "uploads": args.uploads,
            "answers": dict(found),
            "server_errors": sum(n for code, n in found.items() if code.startswith("5")),
            "unanswered": sum(n for code, n in found.items() if not code.isdigit()),
            "longest_s": longest,
            "idle_mb": idle,
            "peak_mb": memory("VmHWM"),
            "bound_mb": idle + 1.25 * Limits().memory_mb * 1e6 / 2**20,
        }
    finally:
        server.terminate()
        server.communicate(timeout=60)


def table(report: dict) -> str:
    """Return the result as Markdown."""
    lines = [
        "# Hostile files and uploads",
        "",
        "Generated files that are damaged, oversized or made to attack (images, file names, FIFOs, masks, annotations,",
        "archives, lists, parts, recipes, run folders, weights), each read by a command in a process of its own; and",
        "such images sent to a running `pale serve`, to all three tasks, a quarter as requests of the Open Inference",
        "Protocol. Memory is the largest resident set of a process; `base` is that of a process that has only imported",
        "the package and predicted nothing, or of the server before the first upload.",
        "",
    ]
    if found := report.get("files"):
        commands = ", ".join(f"{k} {v}" for k, v in sorted(found["commands"].items()))
        codes = ", ".join(f"{k}: {v}" for k, v in sorted(found["exit_codes"].items()))
        lines += [
            "| files | result |",
            "| --- | --- |",
            f"| files | {found['files']} |",
            f"| commands | {found['cases']} ({commands}) |",
            f"| exit codes | {codes} |",
            f"| tracebacks | {found['tracebacks']} |",
            f"| hangs (over {found['limit_s']:.0f} s of CPU time, or {WAIT} times that) | {found['hangs']} |",
            f"| deaths by a signal | {found['signals']} |",
            f"| terminal escapes printed raw | {found['raw_escapes']} |",
            f"| longest command | {found['longest_s']:.1f} s of CPU time |",
            f"| peak memory, MB | {found['peak_mb']:.0f} (base {found['base_mb']:.0f}, "
            f"bound {found['bound_mb']:.0f}) |",
            "",
            described(found),
            "",
        ]
    if found := report.get("uploads"):
        answers = ", ".join(f"{k}: {v}" for k, v in sorted(found["answers"].items()))
        lines += [
            "| uploads | result |",
            "| --- | --- |",
            f"| uploads | {found['uploads']} |",
            f"| answers by status | {answers} |",
            f"| answers of 5xx | {found['server_errors']} |",
            f"| without an answer | {found['unanswered']} |",
            f"| longest answer | {found['longest_s']:.1f} s |",
            f"| peak memory, MB | {found['peak_mb']:.0f} (base {found['idle_mb']:.0f}, "
            f"bound {found['bound_mb']:.0f}) |",
            "",
            described(found),
            "",
        ]
    return "\n".join(lines)


def described(found: dict) -> str:
    """Return the line that names command, date and versions."""
    facts = found["environment"]
    return (
        f"`{found['command']}`, {found['date']}, {found['seconds']} s; pale {facts['pale']}, "
        f"commit {facts['commit']}, torch {facts['torch']}, timm {facts['timm']}, Python {facts['python']}, CPU."
    )


def without_work(words: list[str]) -> list[str]:
    """Return a command line without the place of the generated files, which depends on the machine."""
    if "--work" not in words:
        return words
    at = words.index("--work")
    return words[:at] + words[at + 2 :]


def recorded(part: Callable[[argparse.Namespace], dict]) -> Callable[[argparse.Namespace], dict]:
    """Add command, date, duration and versions to the result of a part."""

    def run(args: argparse.Namespace) -> dict:
        began = time.monotonic()
        with join() as world:
            about = {
                "environment": environment(world),
                "command": shlex.join(["python", *without_work(sys.argv)]),
            }
        found = part(args)
        about |= {
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - began),
        }
        return about | found

    return run


PARTS = {"files": recorded(files), "uploads": recorded(uploads)}
NUMBER = {"files": "cases", "uploads": "uploads"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="0: keep those of an earlier run")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--uploads", type=int, default=1000, help="0: keep those of an earlier run")
    parser.add_argument(
        "--seconds", type=float, default=60, help="CPU time; a case that takes longer hangs"
    )
    parser.add_argument("--memory-mb", type=float, default=2500, help="bound of a case")
    parser.add_argument("--work", type=Path, default=Path("runs/hostile"), help="generated files")
    parser.add_argument("-o", "--output", type=Path, required=True, help="without suffix")
    args = parser.parse_args()
    report = {part: run(args) for part, run in PARTS.items() if getattr(args, NUMBER[part])}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    path = args.output.with_suffix(".json")
    earlier = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(earlier | report, indent=1) + "\n")
    args.output.with_suffix(".md").write_text(table(earlier | report))
    print(table(report))
    failed = len(report["files"]["failed"]) if "files" in report else 0
    if found := report.get("uploads"):
        failed += found["server_errors"] + found["unanswered"]
        failed += found["peak_mb"] > found["bound_mb"]
    if failed:
        raise SystemExit(f"{failed} cases failed; {args.work} has the files of commands")


if __name__ == "__main__":
    main()
