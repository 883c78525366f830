"""Generate parts of the site from the code at build time, so that they cannot become outdated.

`<!-- commands -->` in a page is replaced by the reference of all commands, from their parsers; `<!-- recipes -->` by
tables of all recipes; `<!-- changelog -->` by CHANGELOG.md. Pages outside docs/ (`OUTSIDE`) become pages of the site,
and links to them are rewritten to point to those pages.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from pale import recipes
from pale.cli.commands import build_parser
from pale.cli.parser import Help, Parser, help_line, walk

ROOT = Path(__file__).parent.parent
# Files outside docs/ and their pages on the site.
OUTSIDE = {
    "SECURITY.md": "security.md",
    "LICENSE-WEIGHTS.md": "license-weights.md",
    "src/pale/ops/pale_attention/README.md": "attention_kernels.md",
    "examples/other_runtimes.py": "examples/other_runtimes.py",
    "benchmarks/results/h200.md": "results/h200.md",
    "benchmarks/results/h200.json": "results/h200.json",
    "benchmarks/results/attention_op_h200.md": "results/attention_op_h200.md",
    "benchmarks/results/learning_h200.json": "results/learning_h200.json",
    "benchmarks/results/small_data_h200.md": "results/small_data_h200.md",
    "benchmarks/results/small_data_h200.json": "results/small_data_h200.json",
    "benchmarks/results/small_data_h200.png": "results/small_data_h200.png",
    "benchmarks/results/host_cost_cpu.md": "results/host_cost_cpu.md",
    "benchmarks/results/house.md": "results/house.md",
    "benchmarks/results/kills.md": "results/kills.md",
    "benchmarks/results/hostile.md": "results/hostile.md",
    "benchmarks/results/reading_h200.md": "results/reading_h200.md",
    "benchmarks/results/reading_h200.json": "results/reading_h200.json",
    "benchmarks/results/cluster_model.md": "results/cluster_model.md",
    "benchmarks/results/loader_plan_cpu.md": "results/loader_plan_cpu.md",
    "benchmarks/results/saving_cpu.md": "results/saving_cpu.md",
    "benchmarks/results/segmentation_h200.md": "results/segmentation_h200.md",
    "benchmarks/results/segmentation_h200.json": "results/segmentation_h200.json",
    "benchmarks/results/segmentation_speed_h200.json": "results/segmentation_speed_h200.json",
    "benchmarks/results/segmentation_h200_curves.png": "results/segmentation_h200_curves.png",
    "benchmarks/results/segmentation_h200_predictions.png": "results/segmentation_h200_predictions.png",
    "benchmarks/results/detection_h200.md": "results/detection_h200.md",
    "benchmarks/results/detection_h200.json": "results/detection_h200.json",
    "benchmarks/results/detection_speed_h200.json": "results/detection_speed_h200.json",
    "benchmarks/results/detection_h200_curves.png": "results/detection_h200_curves.png",
    "benchmarks/results/detection_h200_predictions.png": "results/detection_h200_predictions.png",
    "benchmarks/results/general_tiny_h200.json": "results/general_tiny_h200.json",
    "benchmarks/results/demo_weights_h200.json": "results/demo_weights_h200.json",
    "benchmarks/results/bulk_cpu.md": "results/bulk_cpu.md",
    "benchmarks/results/cpu.md": "results/cpu.md",
    "benchmarks/results/transfer_cpu.md": "results/transfer_cpu.md",
    "benchmarks/results/serving_cpu.md": "results/serving_cpu.md",
    "benchmarks/results/interop.json": "results/interop.json",
    "deploy/Containerfile": "deploy/Containerfile",
    "deploy/kubernetes.yaml": "deploy/kubernetes.yaml",
    "deploy/skypilot.yaml": "deploy/skypilot.yaml",
    "deploy/train.sbatch": "deploy/train.sbatch",
    "deploy/trainjob.yaml": "deploy/trainjob.yaml",
    "examples/onnx_predict.py": "examples/onnx_predict.py",
}
LINK = re.compile(r"(\]\()([^)#\s]+)([)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert generated text, and rewrite links to files outside docs/ to their pages."""
    for name, make in (("commands", commands), ("recipes", recipe_tables), ("changelog", changes)):
        mark = f"<!-- {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, page: str) -> str:
    """Return a page with links to files outside docs/ rewritten to their pages on the site."""
    depth = "../" * page.count("/")

    def lead(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        if "://" in target:
            return match.group()
        found = (ROOT / "docs" / page).parent / target
        try:
            inside = str(found.resolve().relative_to(ROOT))
        except ValueError:
            return match.group()
        if target.startswith("../docs/"):  # from CHANGELOG.md
            return f"{before}{depth}{inside.removeprefix('docs/')}{after}"
        return f"{before}{depth}{OUTSIDE[inside]}{after}" if inside in OUTSIDE else match.group()

    return LINK.sub(lead, markdown)


def changes() -> str:
    """Return CHANGELOG.md without its title, with links relative to docs/."""
    text = (ROOT / "CHANGELOG.md").read_text().partition("\n")[2]
    return re.sub(r"(\]\()(?![a-z]+:|#)", r"\1../", text)


def recipe_tables() -> str:
    """Return a table for each module of recipes, below the docstring of the module."""
    groups: dict[str, list[str]] = {}
    for name in recipes.RECIPES:
        groups.setdefault(name.partition(".")[0], []).append(name)
    parts = []
    for group, names in groups.items():
        module = inspect.getmodule(recipes.RECIPES[names[0]])
        parts += [f"## {group}", "", escaped(inspect.getdoc(module) or ""), ""]
        parts += ["| recipe | what | length | batch |", "| --- | --- | --- | --- |"]
        for name in names:
            recipe = recipes.get(name)
            count, unit = (recipe.steps, "step") if recipe.steps else (recipe.epochs, "epoch")
            length = f"{count} {unit}{'s' * (count != 1)}"
            about = " ".join(escaped(recipe.about).split())
            parts.append(f"| `{name}` | {about} | {length} | {recipe.batch} |")
        parts.append("")
    return "\n".join(parts)


def commands() -> str:
    """Return every command with its arguments and options, in the order of `pale --help`."""
    parser = build_parser()
    parts = ["| | command | |", "| --- | --- | --- |"]
    leaves = {" ".join(path): p for path, p in walk(parser) if not p.commands}
    for title, names in parser.groups.items():
        for name in names:
            first = f"**{title}**" if name == names[0] else ""
            line = escaped(help_line(parser.commands[name].description or ""))
            parts.append(f"| {first} | [`pale {name}`](#pale-{name}) | {line} |")
    for names in parser.groups.values():
        for name in names:
            inner = [full for full in leaves if full == name or full.startswith(f"{name} ")]
            parts += ["", f"## pale {name}", ""]
            if inner != [name]:
                parts += [escaped(parser.commands[name].description or ""), ""]
            for full in inner:
                if inner != [name]:
                    parts += ["", f"### pale {full}", ""]
                parts += list(reference(leaves[full]))
    return "\n".join(parts)


def reference(parser: Parser) -> Iterator[str]:
    """Yield the reference of one command: description, usage, table of arguments, and epilog."""
    yield from (escaped(parser.description or ""), "")
    formatter = Help(parser.prog, width=84)
    formatter.add_usage(None, parser.actions, [], prefix="")
    yield from ("```text", formatter.format_help().strip(), "```", "", "| | |", "| --- | --- |")
    for action in parser.actions:
        if action.dest == "help":
            continue
        yield f"| {signature(action)} | {explained(action)} |"
    if parser.settings is not None:
        yield "| `--SETTING VALUE` | a setting of the recipe, such as `--data.root DIR` |"
    text, _, examples = (parser.epilog or "").partition("\n  ")
    if text:
        yield from ("", escaped(text.removesuffix("Examples:").removesuffix("Example:").strip()))
    if examples:
        lines, _, after = f"  {examples}".partition("\n\n")
        yield from ("", "```bash", *(line.strip() for line in lines.splitlines()), "```")
        if after:
            yield from ("", escaped(after))


def signature(action: argparse.Action) -> str:
    """Return an argument as it is typed."""
    if not action.option_strings:
        name = action.metavar or action.dest
        return f"`{name if isinstance(name, str) else ' '.join(name)}`"
    value = ""
    if action.nargs != 0:
        word = action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}"
        value = " " + (word if isinstance(word, str) else " ".join(word))
        value += " ..." if action.nargs in ("+", "*") else ""
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def explained(action: argparse.Action) -> str:
    """Return the description of an argument, with its default."""
    text = escaped((action.help or "").replace("%%", "%"))
    if action.required and action.option_strings:
        text += "; required"
    if not action.option_strings and action.choices:
        text += ": " + ", ".join(f"`{choice}`" for choice in action.choices)
    return text


def escaped(text: str) -> str:
    """Escape text for Markdown."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
