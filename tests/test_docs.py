"""The documentation is true: the site builds strictly, links lead somewhere, and commands in it can be typed."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pale import recipes
from pale.cli.commands import build_parser
from pale.cli.main import parse
from pale.cli.parser import descend, walk
from pale.core.settings import dotted_names
from pale.recipes.kinds import KINDS

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("examples/*.md"),
        *ROOT.glob("benchmarks/results/*.md"),
        ROOT / "src/pale/ops/pale_attention/README.md",
    ]
)
PARSER = build_parser()
SETTINGS = {name for kind in KINDS.values() for name in dotted_names(kind)}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def fenced(text, *languages):
    """The content of a page's fenced blocks."""
    for language, content in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language in languages:
            yield content


def commands(text):
    """The words after `pale` of each command in a shell script, as the shell would give them."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="<>|;&()")
        lexer.whitespace_split, lexer.commenters = True, "#"
        command = []
        for word in [*lexer, ";"]:
            if set(word) <= set("<>|;&()"):
                yield from after_pale(command)
                # What follows > is a file.
                command = ["to"] if set(word) <= set("<>") else []
            else:
                command.append(word)


def after_pale(words):
    if words[:1] == ["pale"]:
        yield words[1:]
    elif "torchrun" in words[:2] and "pale" in words:
        yield words[words.index("pale") + 1 :]


def check_command(words):
    """Raise unless the command can be typed: its options, its recipe, and every setting of it."""
    if "$what" in words:  # a shell variable for one of two commands
        return
    args = parse(words)
    if args.settings is None:
        return
    name = getattr(args, "recipe", None)
    if name is None or name.isupper():  # a placeholder, or a run whose recipe is anyone's
        assert set(args.overrides) <= SETTINGS
    else:
        recipes.get(name).override(args.overrides)


def test_the_commands_of_a_script_are_found():
    script = (
        "pip install x   # pale nothing\npale a 'b c' \\\n  -d   # note\nx=$(pale e) && pale f > g\n"
        "srun torchrun --n 4 -m pale train h | cat\n"
    )
    assert list(commands(script)) == [["a", "b c", "-d"], ["e"], ["f"], ["train", "h"]]


@pytest.mark.parametrize(
    "line",
    [
        "pale traen quickstart",
        "pale train quickstrat",
        "pale train quickstart --optim.lrr 1",
        "pale train quickstart --batch many",
        "pale eval RUN --data.rooot x",
        "pale view pales pale_tiny --photo x.png",
        "pale data check",
    ],
)
def test_stale_commands_would_be_noticed(line):
    (words,) = commands(line)
    with pytest.raises((SystemExit, ValueError, AssertionError)):
        check_command(words)


@each_page
def test_fenced_commands_can_be_typed(page):
    for block in fenced(page.read_text(), "bash", "sh", "console"):
        for words in commands(block):
            check_command(words)


@each_page
def test_example_files_that_commands_name_exist(page):
    for block in fenced(page.read_text(), "bash", "sh", "console", "python"):
        for name in re.findall(r"\bexamples/[\w./-]*\w", block):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"


@pytest.mark.parametrize("name", [" ".join(path) for path, _ in walk(PARSER)])
def test_examples_in_the_help_can_be_typed(name):
    _, parser = descend(PARSER, name.split())
    lines = (parser.epilog or "").splitlines()
    examples = [line for line in lines if line.startswith("  ")]
    assert bool(examples) == ("Example" in (parser.epilog or "") or name == "completion")
    for words in commands("\n".join(examples)):
        check_command(words)


@each_page
def test_commands_in_a_sentence_exist_with_their_options(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`(pale [^`]+)`", prose):
        words = shlex.split(code, comments=True)[1:]
        if not words or not re.fullmatch(r"[a-z][a-z-]*", words[0]):  # `pale COMMAND --help`
            continue
        if page.name == "CHANGELOG.md":  # describes earlier versions
            continue
        path, parser = descend(PARSER, words)
        if path == ["bench"]:  # `pale bench MODEL` is `pale bench models MODEL`
            path, parser = descend(PARSER, ["bench", "models"])
        assert path, f"{page.name}: {code}"
        inner = set(words[len(path) : len(path) + 1]) - {"--help"}
        assert not parser.commands or not inner, f"{page.name}: {code}"
        for word in words[len(path) :]:
            option = word.partition("=")[0]
            if not re.match(r"--?[a-z]", option) or option == "--help":
                continue
            known = option in parser.option_strings
            setting = parser.settings is not None and option.removeprefix("--") in SETTINGS
            assert known or setting, f"{page.name}: {code} has no {option}"


def anchors(text):
    """The names of a page's headings, as forges and the site make them."""
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@each_page
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        if anchor and file.suffix == ".md":
            assert anchor in set(anchors(file.read_text())), f"{page.name}: {target}"


def test_pages_outside_docs_that_the_site_links_to_are_part_of_it():
    """The build itself, which fails too, is a slow test."""
    (assigned,) = re.findall(
        r"^OUTSIDE = (\{.*?^\})", (ROOT / "docs/hooks.py").read_text(), re.MULTILINE | re.DOTALL
    )
    outside = {ROOT / source for source in ast.literal_eval(assigned)}
    for page in [*ROOT.glob("docs/*.md"), ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#:\s]+)[)#]", page.read_text()):
            file = (page.parent / target).resolve()
            assert file.is_relative_to(ROOT / "docs") or file in outside, f"{page.name}: {target}"


def test_python_of_the_quickstart_runs():
    (code,) = fenced((ROOT / "docs/quickstart.md").read_text(), "python")
    scope = {}
    exec(code.replace("pale_tiny", "pale_nano").replace("200, 333", "72, 90"), scope)
    assert scope["logits"].shape == (2, 10)
    assert [tuple(m.shape[2:]) for m in scope["maps"]] == [(18, 23), (9, 12), (5, 6), (3, 3)]


def names_of_pale(code):
    """Yield (module, name) of what a Python block imports from this package or takes as `pale.name`."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.ImportFrom(module=module) if module.split(".")[0] == "pale":
                yield from ((module, name.name) for name in node.names)
            case ast.Attribute(value=ast.Name(id="pale")):
                yield "pale", node.attr


@each_page
def test_names_in_python_blocks_exist(page):
    for block in fenced(page.read_text(), "python"):
        for module, name in names_of_pale(block):
            known = hasattr(importlib.import_module(module), name)
            assert known or importlib.util.find_spec(f"{module}.{name}"), f"{module}.{name}"


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/training.md", "CONTRIBUTING.md"])
def test_named_source_files_exist(page):
    text = (ROOT / page).read_text()
    for path in re.findall(r"`((?:\w+/)+\w+\.py)`", text):
        found = (
            path if path.startswith(("src/", "tests/", "tools/", "docs/")) else f"src/pale/{path}"
        )
        assert "NAME" in path or (ROOT / found).is_file(), f"{page}: {path}"


WALKS = ("## `pale train`", "## `pale predict`", "## One batch through the model")


@pytest.mark.parametrize("title", WALKS)
def test_classes_and_functions_of_a_walk_are_in_its_files(title):
    section = (ROOT / "docs/architecture.md").read_text().split(f"{title}\n")[1].split("\n## ")[0]
    words = re.findall(r"`([^`]+)`", section)
    files = [
        word.replace("NAME", "segmentation") for word in words if re.search(r"/\w+\.py$", word)
    ]
    files += ["errors.py", "tasks/base.py", "tasks/pipeline.py", "tasks/prediction.py"]
    text = "\n".join((ROOT / "src/pale" / file).read_text() for file in files)
    names = [word for word in words if re.fullmatch(r"[A-Z]\w+(\.\w+)?|[a-z]+_[a-z_]+", word)]
    assert len(names) >= 5
    for name in names:
        for part in name.split("."):
            assert re.search(rf"^ *(class|def) {part}\b", text, re.MULTILINE), name


def test_the_readme_has_at_most_120_lines_of_120_characters():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def test_figures_are_what_their_script_draws(tmp_path):
    scope = {"__name__": "figures", "__file__": str(tmp_path / "figures.py")}
    exec(compile((ROOT / "docs/figures.py").read_text(), "figures.py", "exec"), scope)
    for name in ("groups", "modes", "block", "positions"):
        scope[name]()
        drawn = (tmp_path / "figures" / f"{name}.svg").read_text()
        assert drawn == (ROOT / "docs/figures" / f"{name}.svg").read_text()


class Seen(HTMLParser):
    """Text, names of places, and what a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.text, self.ids, self.fetched = [], set(), []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids.add(values.get("id"))
        wanted = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}
        if tag in wanted and values.get(wanted[tag]) and values.get("rel") not in ("next", "prev"):
            self.fetched.append(values[wanted[tag]])

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def read(path):
    page = Seen()
    page.feed(path.read_text())
    return page


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 20
    for path in pages:
        assert not [url for url in read(path).fetched if "//" in url], path
    for css in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", css.read_text()), css


@pytest.mark.slow
def test_every_command_option_and_recipe_is_on_its_page(site):
    page = read(site / "cli.html")
    text = "".join(page.text)
    for path, parser in walk(PARSER):
        assert "-".join(("pale", *path)) in page.ids
        for action in parser.actions:
            assert all(option in text for option in action.option_strings if option != "-h")
    text = "".join(read(site / "recipes.html").text)
    for name in recipes.RECIPES:
        assert name in text


@pytest.mark.slow
def test_the_api_page_has_signatures(site):
    text = "".join(read(site / "api.html").text)
    for name in ("pale_attention", "create_model", "feature_pyramid", "attention_weights"):
        assert f"{name}(" in text
