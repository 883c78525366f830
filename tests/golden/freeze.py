"""Write the golden files: `python tests/golden/freeze.py SECTION ...`.

They hold what the package did when they were written (version 0.1.0), so a section is written again only where its
behaviour was changed on purpose and a line in renames.py cannot express that. The section `kept` stands for files of
an earlier version: it is never written again, or the test that today's version reads them would be lost.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))
from golden import cases, collect, surface


def write(name: str, content: Any) -> None:
    """Write JSON with a line for each value of the innermost lists and tables."""
    text = json.dumps(content, indent=1)
    (collect.FILES / name).write_text(text + "\n")


def public() -> None:
    """Write the public names."""
    write("public.json", collect.public_names())


def options() -> None:
    """Write the arguments of all commands."""
    write("options.json", collect.options())


def recipes() -> None:
    """Write the settings of all recipes."""
    found = collect.differences(collect.settings())
    text = yaml.safe_dump(found, sort_keys=False, width=120, default_flow_style=None)
    (collect.FILES / "recipes.yaml").write_text(text)


def state_dicts() -> None:
    """Write the state-dict keys of all models."""
    models = collect.public_names()["models"]
    write(
        "state_dicts.json",
        {
            "models": {name: collect.registered_keys(name) for name in models},
            "recipes": {task: collect.recipe_summaries(task) for task in cases.TASKS},
            "listed": {name: collect.listed_keys(name) for name in collect.LISTED},
        },
    )


def numbers() -> None:
    """Write what models compute."""
    with collect.one_thread():
        found = {name: compute() for name, compute in collect.NUMBERS.items()}
        found |= {f"kept {task}": collect.kept_predictions(task) for task in cases.TASKS}
    write("numbers.json", {"machine": collect.machine(), "numbers": found})


def commands() -> None:
    """Write exit codes, JSON keys and files of calls of the command line."""
    found = {}
    for name, case in cases.CASES.items():
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[name] = collect.call(case, Path(folder).resolve())
        print(f"{name}: {found[name]['exit']}, {time.perf_counter() - began:.1f} s")  # noqa: T201
    write("commands.json", found)


def serve() -> None:
    """Write the JSON keys of `pale serve`."""
    write("serve.json", collect.served())


def kept() -> None:
    """Write a stopped run, weights and packed weights of each task, to be read by later versions."""
    for task in cases.TASKS:
        archive = collect.FILES / f"{task}.tar.xz"
        if archive.exists():
            raise SystemExit(
                f"{archive} holds files of an earlier version and is not written again"
            )
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            pale = [sys.executable, "-m", "pale"]
            whole = [*pale, *map(str, cases.training(task, "whole"))]
            env = surface.environment()
            subprocess.run(whole, cwd=root, check=True, env=env)
            packing = [*pale, "weights", "pack", "whole", "-o", "packed.safetensors"]
            subprocess.run(packing, cwd=root, check=True, env=env)
            _stop_in_the_middle([*pale, *map(str, cases.training(task, "run"))], root, env)
            shutil.copy(root / "whole" / "weights.safetensors", root / "final.safetensors")
            (root / "run" / "report.html").unlink(missing_ok=True)
            (root / "run" / "best.safetensors").unlink()  # equal to one of the others
            with tarfile.open(archive, "w:xz", preset=9) as file:
                for name in ("run", "final.safetensors", "packed.safetensors"):
                    file.add(root / name, name, filter=_anonymous)


def _stop_in_the_middle(words: list[str], root: Path, env: dict[str, str]) -> None:
    """Start a run and stop it, as a cluster does, after its first checkpoint."""
    process = subprocess.Popen(words, cwd=root, env=env)
    while not list(root.glob("run/checkpoints/step_*")):
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    code = process.wait()
    (last,) = (root / "run" / "checkpoints").glob("step_*")
    print(f"stopped with {code} at {last.name}")  # noqa: T201
    assert code == 128 + signal.SIGTERM
    assert (root / "run" / "weights.safetensors").is_file()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if entry.name.endswith(".lock"):
        return None
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


SECTIONS = {
    each.__name__: each
    for each in (kept, public, options, recipes, state_dicts, numbers, commands, serve)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    for section in parser.parse_args().sections:
        SECTIONS[section]()
