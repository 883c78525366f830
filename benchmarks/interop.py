"""Run the tests of third-party clients and write what they measured to the page "Works with".

Clients whose requirements agree with ours are in the `dev` extra and run in the environment of this interpreter; each
of the others gets an environment of its own under .venv-interop. `make test-interop` is this program.

    python benchmarks/interop.py                    # all: some 30 minutes on two cores, 6 GB of disk
    python benchmarks/interop.py --only openvino    # one of them; the rows of the others are kept
    python benchmarks/interop.py --page             # write the page from the results alone
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pale

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/interop.json"
PAGE = ROOT / "docs/works-with.md"
BEGIN, END = "<!-- interop -->", "<!-- /interop -->"

# Environment: what pip installs besides the package and pytest, and the test class or file that runs there.
OWN = {
    "openvino": (["openvino", "onnx", "onnxscript", "onnxruntime"], "TestOpenVino"),
    "executorch": (["executorch"], "TestExecuTorch"),
    # coremltools 9.0 converts arrays of one entry to numbers, which numpy 2.4 refuses.
    "coremltools": (["coremltools", "numpy<2.4"], "TestCoreMl"),
    "annotations": (
        ["faster-coco-eval", "label-studio-sdk", "datumaro", "fiftyone", "supervision"],
        "test_annotation_tools.py",
    ),
    "deploy": (["kubernetes-validate", "kubeflow-trainer-api", "skypilot"], "test_deploy_files.py"),
    "ray": (["ray[data]", "pyarrow", "faster-coco-eval"], "test_ray.py"),
    # tritonclient 2.73 requires ml-dtypes up to 0.5.4 and greenlet below 3.4.
    "tritonclient": (
        [
            *("tritonclient[http,grpc]", "httpx", "onnx", "onnxscript", "onnxruntime"),
            *("fastapi", "uvicorn", "python-multipart", "prometheus-client", "faster-coco-eval"),
        ],
        "test_triton_client.py",
    ),
}
TESTING = ["pytest", "pytest-timeout", "hypothesis"]

Row = dict[str, Any]


def interpreter(client: str) -> Path:
    """Return the Python of a client's own environment, made on first use."""
    folder = ROOT / ".venv-interop" / client
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "done"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        wanted = [*TESTING, *OWN[client][0]]
        command = [python, "-m", "pip", "install", "--quiet", "--editable", ROOT, *wanted]
        subprocess.run(command, check=True)
        done.touch()
    return python


def run(python: Path, arguments: Iterable[str]) -> list[Row]:
    """Run tests of tests/interop and return a row for each that has a client."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", "-o", "junit_family=xunit1", "--show-capture=no"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest left no report; run it by hand: {command}")
        cases = ElementTree.parse(report).iter("testcase")
        return [row for case in cases if (row := read_case(case)) is not None]


def read_case(case: ElementTree.Element) -> Row | None:
    """Return what a test recorded (see tests/interop/conftest.py) and its result; None without a client."""
    row = {p.get("name"): p.get("value") for p in case.iter("property")}
    if "client" not in row:
        return None
    row["test"] = f"{case.get('file')}::{case.get('name')}"
    row["seconds"] = round(float(case.get("time", 0)), 1)
    row["result"] = "passed"
    for kind in ("failure", "error", "skipped"):
        if (found := case.find(kind)) is not None:
            row["result"] = {"failure": "failed", "error": "failed"}.get(kind, kind)
            row["reason"] = (found.get("message") or "").partition("\n")[0][:200]
    return row


def groups(environment: str) -> Iterable[tuple[str, Path, list[str]]]:
    """Yield what is run as one, so that an interrupted program keeps its results: name, Python, arguments of pytest."""
    tests = ROOT / "tests/interop"
    runtimes = tests / "test_runtimes.py"
    if environment != "dev":
        chosen = OWN[environment][1]
        whole = chosen.endswith(".py")
        arguments = [str(tests / chosen)] if whole else [str(runtimes), "-k", chosen]
        yield environment, interpreter(environment), arguments
        return
    own = [tests / chosen for _, chosen in OWN.values()]
    for path in sorted(tests.glob("test_*.py")):
        if path not in (runtimes, tests / "test_page.py", *own):
            yield path.stem, Path(sys.executable), [str(path)]


def commit() -> str:
    """Return the commit of the package that is tested, with a mark where its working tree has changes."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    folder = Path(pale.__file__).parent
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def table(results: dict[str, Any]) -> str:
    """Return the page's table: a line for each client and kind of run."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results["rows"]:
        groups.setdefault((row["client"], row["what"]), []).append(row)
    lines = ["| client | run | result | largest figure | bound | peers |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for (client, what), rows in sorted(groups.items()):
        ours = [row for row in rows if row["model"] == "pale"]
        version = ", ".join(sorted({row["version"] for row in rows}))
        figures = [row for row in ours if "figure" in row]
        largest = max(figures, key=lambda row: float(row["figure"]), default=None)
        figure = f"{largest['figure']} {largest['unit']}" if largest else ""
        bound = largest["bound"] if largest else ""
        cells = [f"{client} {version}", what, outcome(ours), figure, bound, peers(rows)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def outcome(rows: list[Row]) -> str:
    """Return passed, or how many tests did not."""
    failed = [row for row in rows if row["result"] == "failed"]
    ran = [row for row in rows if row["result"] != "skipped"]
    if not ran:
        return "not run"
    return f"**{len(failed)} of {len(ran)} failed**" if failed else "passed"


def peers(rows: list[Row]) -> str:
    """Return the results of timm models, with their largest figure."""
    parts = []
    for name in sorted({row["model"] for row in rows} - {"pale"}):
        own = [row for row in rows if row["model"] == name]
        figures = [float(row["figure"]) for row in own if "figure" in row]
        figure = f" ({max(figures):.2g})" if figures else ""
        parts.append(f"{name}: {outcome(own)}{figure}")
    return ", ".join(parts)


def summary(results: dict[str, Any]) -> str:
    """Return the sentence above the table and the table."""
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for row in results["rows"]:
        counts[row["result"]] += 1
    torches = ", ".join(sorted({row["torch"] for row in results["rows"]}))
    commits = ", ".join(sorted({row["commit"] for row in results["rows"]}))
    return (
        f"{results['date']}, commit {commits}, {results['machine']}, Python {results['python']}, "
        f"torch {torches}: {counts['passed']} tests passed, {counts['failed']} failed, "
        f"{counts['skipped']} were skipped.\n\n{table(results)}"
    )


def write_page(results: dict[str, Any]) -> None:
    """Put the table between the marks of the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{summary(results)}\n{END}{after}")


def main() -> int:
    """Run what is asked for; return 1 if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", choices=["dev", *OWN], action="append", help="environments")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    for name in [] if args.page else args.only or ["dev", *OWN]:
        for group, python, arguments in groups(name):
            rows = [row | {"group": group, "commit": commit()} for row in run(python, arguments)]
            results = {
                "date": datetime.date.today().isoformat(),
                "python": platform.python_version(),
                "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
                "rows": [row for row in results["rows"] if row["group"] != group] + rows,
            }
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_page(results)
    return int(any(row["result"] == "failed" for row in results["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
