"""Measure the source tree: sizes, complexity, imports, branches on the task, private names, retired words.

    python tools/house.py                     # the working tree, as a table
    python tools/house.py --compare 83223ff   # a commit beside the working tree
    python tools/house.py --compare 83223ff -o benchmarks/results/house.md
    python tools/house.py --suite             # also the time of the fast tests, which takes minutes
    python tools/house.py --json

Only files that git tracks are counted. A branch on the task is a comparison with a task's name, an `isinstance` or
`match` on one of its classes, or a dictionary keyed by task names, outside `tasks/`.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
import retired_words  # noqa: E402

Sources: TypeAlias = dict[str, str]
Figures: TypeAlias = dict[str, object]
FOREIGN = ("torch", "timm", "torchvision", "triton", "argparse", "transformers", "uvicorn")
DOTTED = re.compile(rf"(?:{'|'.join(FOREIGN)})(?:\.\w+)*\._[a-zA-Z][\w.]*")
READERS = (
    "getattr",
    "hasattr",
    "setattr",
    "delattr",
    "attrgetter",
    "itemgetter",
    "methodcaller",
    "get",
    "pop",
)
PUBLIC = ("_exit", "_replace", "_asdict", "_fields")  # documented, of `os` and of named tuples
TASK_NAMES = {"classification", "segmentation", "detection"}
TASK_CLASSES = ("Classif", "Segment", "Detect", "UperNet", "MaskRCNN")
MAX_COMPLEXITY, MAX_LINES, LARGE_LINES = 15, 600, 500


def sources(commit: str | None) -> Sources:
    """Return the Python files under src/pale by path, of a commit or of the working tree."""
    command = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", commit or "HEAD", "src/pale"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    paths = [path for path in listed if path.endswith(".py")]
    if commit is None:
        return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).exists()}
    show = ["git", "-C", str(ROOT), "show"]
    return {
        path: subprocess.run(
            [*show, f"{commit}:{path}"], capture_output=True, text=True, check=True
        ).stdout
        for path in paths
    }


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield every function and method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def complexity(function: ast.AST) -> int:
    """Return the cyclomatic complexity, as McCabe counts it with boolean operators."""
    count = 1
    for node in ast.walk(function):
        if isinstance(
            node,
            ast.If
            | ast.IfExp
            | ast.For
            | ast.AsyncFor
            | ast.While
            | ast.ExceptHandler
            | ast.Assert
            | ast.match_case,
        ):
            count += 1
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
    return count


def inner_imports(tree: ast.AST) -> int:
    """Return the number of import statements inside functions."""
    found = {
        id(node)
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return len(found)


def task_branches(tree: ast.AST) -> int:
    """Return the number of decisions that depend on which task it is."""
    return sum(_is_task_branch(node) for node in ast.walk(tree))


def _is_task_branch(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(_is_task_name(part) for part in [node.left, *node.comparators])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "isinstance" and _names_task_class(node.args[-1])
    if isinstance(node, ast.match_case):
        return any(
            _is_task_name(part.value)
            if isinstance(part, ast.MatchValue)
            else isinstance(part, ast.MatchClass) and _names_task_class(part.cls)
            for part in ast.walk(node.pattern)
        )
    # All keys: an annotation of COCO has a key "segmentation" beside others.
    return (
        isinstance(node, ast.Dict)
        and bool(node.keys)
        and all(key and _is_task_name(key) for key in node.keys)
    )


def _is_task_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple | ast.Set | ast.List):
        return any(map(_is_task_name, node.elts))
    return isinstance(node, ast.Constant) and node.value in TASK_NAMES


def _names_task_class(node: ast.AST) -> bool:
    named = [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]
    named += [part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)]
    return any(name.startswith(TASK_CLASSES) for name in named)


def private_names(tree: ast.AST, own: frozenset[str] = frozenset()) -> int:
    """Return the number of uses of underscored names of other packages.

    These are imports, attributes of their modules and objects, and strings that name one (`getattr(x, "_y")`,
    `x.__dict__["_y"]`, `"torch._C"`).

    Args:
        tree: a module.
        own: underscored attributes that the package itself defines.
    """
    return len(list(private_uses(tree, own)))


def private_uses(tree: ast.AST, own: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each use that `private_names` counts."""
    relative: set[str] = set()  # modules and functions of the package itself
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in FOREIGN and "._" in alias.name:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            if not _root(node):
                relative |= {alias.asname or alias.name for alias in node.names}
            for alias in node.names:
                if _root(node) in FOREIGN and _is_private(f"{node.module}.{alias.name}"):
                    yield node.lineno, f"{node.module}.{alias.name}"
    own = own | defined_attributes(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in PUBLIC:
            inside = isinstance(node.value, ast.Name) and node.value.id in relative
            if not inside and (node.attr not in own or _is_super(node.value)):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call | ast.Subscript):
            for name in _named_attributes(node):
                if name not in own:
                    yield node.lineno, name
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and DOTTED.fullmatch(node.value)
        ):
            yield node.lineno, node.value


def defined_attributes(tree: ast.AST) -> frozenset[str]:
    """Return the underscored methods and attributes of the classes in a module."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(part.name)
                elif isinstance(part, ast.AnnAssign | ast.Assign):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    return frozenset(filter(_is_private, names))


def _named_attributes(node: ast.Call | ast.Subscript) -> Iterator[str]:
    """Yield underscored names in strings that select an attribute."""
    if isinstance(node, ast.Subscript):
        parts: list[ast.expr] = [node.slice]
    else:
        called = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        parts = node.args if called in READERS else []
    for part in parts:
        name = getattr(part, "value", None)
        if isinstance(name, str) and name.isidentifier() and _is_private(name):
            yield name


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _root(node: ast.ImportFrom) -> str:
    return "" if node.level or not node.module else node.module.partition(".")[0]


def _is_private(name: str) -> bool:
    parts = name.split(".")
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def foreign_underscores(tree: ast.AST) -> int:
    """Return the number of uses of underscored names of another module of the package."""
    count = 0
    relative: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            count += sum(_is_private(alias.name) for alias in node.names)
            relative |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            count += isinstance(node.value, ast.Name) and node.value.id in relative
    return count


def measure(files: Sources) -> Figures:
    """Return every figure of a set of files, by path from the root of the repository."""
    trees = {path: ast.parse(text) for path, text in files.items()}
    inside = {path: path.removeprefix("src/pale/") for path in files}
    lines = Counter[str]()
    for path, text in files.items():
        package = inside[path].partition("/")[0] if "/" in inside[path] else "(beside)"
        lines[package] += text.count("\n")

    def total(count: Callable[[ast.AST], int], skip: tuple[str, ...] = ()) -> int:
        return sum(count(tree) for path, tree in trees.items() if not inside[path].startswith(skip))

    sized = [
        (function.end_lineno - function.lineno + 1, f"{inside[path]}:{function.name}")
        for path, tree in trees.items()
        for function in functions(tree)
        if function.end_lineno is not None
    ]
    longest = max(sized)
    anys = total(
        lambda tree: sum(isinstance(n, ast.Name) and n.id == "Any" for n in ast.walk(tree))
    )
    own = frozenset[str]().union(*map(defined_attributes, trees.values()))
    return {
        "modules beside packages": sum(
            "/" not in path and path != "__init__.py" for path in inside.values()
        ),
        "lines": sum(lines.values()),
        "lines per package": dict(sorted(lines.items())),
        "lines of cli": sum(n for name, n in _cli_lines(files, inside)),
        "longest function": f"{longest[0]} ({longest[1]})",
        "functions over 60 lines": sum(size > 60 for size, _ in sized),
        f"functions over complexity {MAX_COMPLEXITY}": total(
            lambda tree: sum(complexity(f) > MAX_COMPLEXITY for f in functions(tree))
        ),
        f"files over {LARGE_LINES} lines": sum(
            text.count("\n") > LARGE_LINES for text in files.values()
        ),
        f"files over {MAX_LINES} lines": sum(
            text.count("\n") > MAX_LINES for text in files.values()
        ),
        "Any": anys,
        "Any per 1000 lines": round(1000 * anys / max(1, sum(lines.values())), 1),
        "imports inside functions": total(inner_imports),
        "task branches outside tasks/": total(task_branches, ("tasks/",)),
        "private names outside compat.py": total(
            lambda tree: private_names(tree, own), ("compat.py",)
        ),
        "underscored names imported from a sibling": total(foreign_underscores),
        "retired words": sum(len(list(retired_words.find(text))) for text in files.values()),
    }


def _cli_lines(files: Sources, inside: dict[str, str]) -> Iterator[tuple[str, int]]:
    for path, text in files.items():
        if inside[path].startswith(("cli/", "cli.py", "cli_")):
            yield path, text.count("\n")


def measure_suite() -> str:
    """Run the fast tests on two processes; return their time and result."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "-m", "not slow and not gpu"], cwd=ROOT, capture_output=True, text=True
    )
    minutes = (time.perf_counter() - start) / 60
    result = done.stdout.strip().splitlines()[-1].strip("= ") if done.stdout else done.stderr[-200:]
    return f"{minutes:.1f} minutes ({result})"


def format_table(now: Figures, then: Figures | None) -> str:
    """Return the figures as a Markdown table, of a commit and the working tree or of the latter only."""
    lines = [
        "| | " + ("before | after |" if then else "now |"),
        "| --- |" + " --- |" * (2 if then else 1),
    ]
    for name, value in now.items():
        cells = [value] if then is None else [then.get(name, "not measured"), value]
        lines.append(f"| {name} | " + " | ".join(map(_shown, cells)) + " |")
    return "\n".join(lines)


def write_page(path: Path, table: str, commit: str | None) -> None:
    """Write the table with the command, the date and both commits."""
    head = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    options = f" --compare {commit}" if commit else ""
    versions = f"Before: commit {commit}. After: commit {head}." if commit else f"Commit {head}."
    path.write_text(
        "# Source tree\n\n"
        f"Written by `python tools/house.py{options} -o {path.name}`, {date.today()}. {versions}\n"
        "`tests/test_house.py` checks the limits of CONTRIBUTING.md with the same program. Counts of lines include\n"
        "the features that were added between the two commits.\n\n"
        f"{table}\n"
    )


def main() -> None:
    """Print or write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--compare", metavar="COMMIT", help="a commit to show beside the working tree"
    )
    parser.add_argument("--suite", action="store_true", help="run and time the fast tests, too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a Markdown page")
    args = parser.parse_args()
    now = measure(sources(None))
    if args.suite:
        now["fast tests"] = measure_suite()
    then = measure(sources(args.compare)) if args.compare else None
    if args.output:
        write_page(args.output, format_table(now, then), args.compare)
    elif args.json:
        print(json.dumps({"before": then, "after": now} if then else now, indent=1))
    else:
        print(format_table(now, then))


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return str(value)


if __name__ == "__main__":
    main()
