"""`import pale`: lazy, the same names however the process was started, and models registered with timm."""

import json
import subprocess
import sys

import pytest

import pale

# Names of the package, kind of `export`, and the models that timm lists if it is imported.
SHOW = """
import json, sys, pale
timm = sys.modules.get("timm")
names = dir(pale)
print(json.dumps([names, timm.list_models("pale_*") if timm else None, type(pale.export).__name__]))
"""
MODULE = """
import runpy, sys
sys.argv = ["pale", "--version"]
try:
    runpy.run_module("pale", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code
"""
COMMAND = "from pale.cli.main import main\ntry:\n    main(['--version'])\nexcept SystemExit: pass"


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_pale_imports_neither_torch_nor_timm():
    found = run("import sys, pale; print(sorted({'torch', 'timm', 'numpy'} & set(sys.modules)))")
    assert found.strip() == "[]"


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="Python"),
        pytest.param(MODULE, id="python -m pale"),
        pytest.param(COMMAND, id="pale"),
        pytest.param("import pale, timm", id="timm second"),
        pytest.param("import timm, pale", id="timm first"),
        pytest.param("import pale; from timm import models", id="part of timm"),
        pytest.param(
            "import pale, importlib.util\nfor _ in range(2): importlib.util.find_spec('timm')\nimport timm",
            id="timm looked for first",
        ),
        pytest.param("import pale.exporting, pale.view", id="submodules"),
    ],
)
def test_public_names_and_registered_models_do_not_depend_on_earlier_imports(before):
    names, models, kind = json.loads(run(f"{before}\n{SHOW}").splitlines()[-1])
    assert names == dir(pale) == sorted([*pale.__all__, "__version__"])
    assert kind == "function"
    assert ("timm" not in before and models is None) or "pale_tiny" in models


def test_every_public_name_can_be_imported_and_no_function_is_a_module():
    modules = {name for name in pale.__all__ if type(getattr(pale, name)).__name__ == "module"}
    assert modules == {"ops"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'pale_attention'"):
        _ = pale.pale_attention
