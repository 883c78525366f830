"""What the site takes from the code at build time, so that it cannot go stale.

`<!-- commands -->` in a page becomes the reference of all commands, from their parsers; `<!-- recipes -->` tables of
all recipes; `<!-- changelog -->` CHANGELOG.md. Pages that live beside the code (`OUTSIDE`) become pages of the
site, and links to them, which lead out of docs/ on a forge, lead to those pages.
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
from pale.cli import _parser
from pale.cli_parser import Help, choices, commands_of, grouped, metavar, shown_default, walk
from pale.cli_train import OVERRIDDEN

ROOT = Path(__file__).parent.parent
# Files of the repository and the pages that they become.
OUTSIDE = {
    "src/pale/ops/pale_attention/README.md": "attention_kernels.md",
    "benchmarks/results/h200.md": "results/h200.md",
    "benchmarks/results/h200.json": "results/h200.json",
    "benchmarks/results/attention_op_h200.md": "results/attention_op_h200.md",
    "benchmarks/results/learning_h200.json": "results/learning_h200.json",
    "benchmarks/results/small_data_h200.md": "results/small_data_h200.md",
    "benchmarks/results/small_data_h200.json": "results/small_data_h200.json",
    "benchmarks/results/small_data_h200.png": "results/small_data_h200.png",
    "benchmarks/results/reading_h200.md": "results/reading_h200.md",
    "benchmarks/results/reading_h200.json": "results/reading_h200.json",
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
    "benchmarks/results/demo_weights_h200.json": "results/demo_weights_h200.json",
    "benchmarks/results/cpu.md": "results/cpu.md",
    "benchmarks/results/onnx_cpu.md": "results/onnx_cpu.md",
    "examples/onnx_predict.py": "examples/onnx_predict.py",
}
LINK = re.compile(r"(\]\()([^)#\s]+)([)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages from outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fill in what is generated, and turn links to files outside docs/ into links to their pages."""
    for name, make in (("commands", commands), ("recipes", recipe_tables), ("changelog", changes)):
        mark = f"<!-- {name} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return relinked(markdown, page.file.src_uri)


def relinked(markdown: str, page: str) -> str:
    """A page with its links to files of the repository leading to the pages that they have become."""
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
        return f"{before}{depth}{OUTSIDE[inside]}{after}" if inside in OUTSIDE else match.group()

    return LINK.sub(lead, markdown)


def changes() -> str:
    """CHANGELOG.md, less its title."""
    return (ROOT / "CHANGELOG.md").read_text().partition("\n")[2]


def recipe_tables() -> str:
    """A table for each module of recipes, under what the module says of itself."""
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
    """Every command with its arguments and options, in the order of `pale --help`."""
    parser = _parser()
    parts = ["| | command | |", "| --- | --- | --- |"]
    leaves = {" ".join(path): p for path, p in walk(parser) if not commands_of(p)}
    for title, names in grouped(parser).items():
        for name in names:
            first = f"**{title}**" if name == names[0] else ""
            line = escaped(choices(parser)[name].help or "")
            parts.append(f"| {first} | [`pale {name}`](#pale-{name}) | {line} |")
    for names in grouped(parser).values():
        for name in names:
            inner = [full for full in leaves if full == name or full.startswith(f"{name} ")]
            parts += ["", f"## pale {name}", ""]
            if inner != [name]:
                parts += [escaped(commands_of(parser)[name].description), ""]
            for full in inner:
                if inner != [name]:
                    parts += ["", f"### pale {full}", ""]
                parts += list(reference(full, leaves[full]))
    return "\n".join(parts)


def reference(name: str, parser: Any) -> Iterator[str]:
    """One command: what it does, its usage, a table of what it takes, and what its help ends with."""
    yield from (escaped(parser.description), "")
    formatter = Help(parser.prog, width=84)
    formatter.add_usage(None, parser._actions, parser._mutually_exclusive_groups, prefix="")
    yield from ("```text", formatter.format_help().strip(), "```", "", "| | |", "| --- | --- |")
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        yield f"| {signature(action)} | {explained(action)} |"
    if name in OVERRIDDEN:
        yield "| `--SETTING VALUE` | a setting of the recipe, such as `--data.root DIR` |"
    text, _, examples = (parser.epilog or "").partition("\n  ")
    if text:
        yield from ("", escaped(text.removesuffix("examples:").removesuffix("example:").strip()))
    if examples:
        lines, _, after = f"  {examples}".partition("\n\n")
        yield from ("", "```bash", *(line.strip() for line in lines.splitlines()), "```")
        if after:
            yield from ("", escaped(after))


def signature(action: argparse.Action) -> str:
    """How an argument is typed."""
    if not action.option_strings:
        name = action.metavar or action.dest
        return f"`{name if isinstance(name, str) else ' '.join(name)}`"
    value = ""
    if action.nargs != 0:
        word = action.metavar or (
            "{" + ",".join(map(str, action.choices)) + "}" if action.choices else metavar(action)
        )
        value = " " + (word if isinstance(word, str) else " ".join(word))
        value += " ..." if action.nargs in ("+", "*") else ""
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def explained(action: argparse.Action) -> str:
    """What an argument means, with its default."""
    text, default = escaped(action.help or ""), shown_default(action)
    if default is not None and "default" not in text:
        text += f" (default {default})"
    if action.required and action.option_strings:
        text += "; required"
    if not action.option_strings and action.choices:
        text += ": " + ", ".join(f"`{choice}`" for choice in action.choices)
    return text


def escaped(text: str) -> str:
    """Text as Markdown shows it."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
