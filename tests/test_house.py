"""The source tree keeps the rules of CONTRIBUTING.md, as `python tools/house.py` measures them."""

import importlib.util
import sys

import pytest

LIMITS = {
    "modules beside packages": 3,
    "lines of cli": 1600,
    "functions over complexity 15": 0,
    "files over 600 lines": 0,
    "task branches outside tasks/": 3,
    "private names outside compat.py": 0,
    "underscored names imported from a sibling": 0,
    "retired words": 0,
}


@pytest.fixture(scope="module")
def house(project):
    spec = importlib.util.spec_from_file_location("house", project / "tools/house.py")
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def figures(house, project):
    if not (project / ".git").exists():
        pytest.skip("the files of the package are listed by git, and this is not a clone")
    return house.measure(house.sources(None))


@pytest.mark.parametrize("rule", LIMITS)
def test_the_source_tree_keeps_the_rule(figures, rule):
    assert figures[rule] <= LIMITS[rule]


def test_each_rule_counts_what_breaks_it(house):
    branches = "".join(f"    if x > {i}:\n        pass\n" for i in range(16))
    bad = {
        "src/pale/a.py": "from torch._dynamo import reset\n",
        "src/pale/b.py": "",
        "src/pale/c.py": "",
        "src/pale/d.py": "# a picture\n",  # kept name: a retired word
        "src/pale/cli/e.py": f"from .f import _hidden\ndef g(x):\n{branches}" + "\n" * 1600,
        "src/pale/train/h.py": 'ok = [task == "detection" for task in ("a", "b")]\n' * 4,
        "src/pale/tasks/i.py": 'ok = task == "detection"\n',
    }
    figures = house.measure(bad)
    for rule, limit in LIMITS.items():
        assert figures[rule] > limit, rule
    assert figures["task branches outside tasks/"] == 4


def test_the_page_has_both_commits_and_every_figure(house, figures, tmp_path):
    before = figures | {"Any": 12345}
    house.write_page(tmp_path / "page.md", house.format_table(figures, before), "1234abc")
    text = (tmp_path / "page.md").read_text()
    assert "Before: commit 1234abc. After: commit" in text
    assert f"| Any | 12345 | {figures['Any']} |" in text
    assert all(f"| {name} | " in text for name in figures)


def test_the_stored_page_is_of_this_program(figures, project):
    text = (project / "benchmarks/results/house.md").read_text()
    assert text.startswith("# Source tree\n\nWritten by `python tools/house.py --compare ")
    assert [row.split(" | ")[0][2:] for row in text.splitlines()[8:]] == list(figures)
