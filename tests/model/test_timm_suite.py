"""timm's own tests of a model, from its source distribution, run on each model of this package.

The wheel carries no tests, so the source distribution of the installed version is fetched once into `build/timm`.
timm's test functions are called as they stand, with the arguments that they are parametrised with.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import timm
from packaging.version import Version
from support.timm_plugin import MODELS, models_listed_as_swin

CACHE = Path(__file__).parents[2] / "build" / "timm"
TESTS = [
    "test_model_forward",
    "test_model_backward",
    "test_model_default_cfgs",
    "test_model_forward_features",
    "test_model_forward_intermediates",
    "test_model_forward_intermediates_features",
    "test_model_forward_fx",
    "test_model_backward_fx",
]
PRUNE = "test_prune_intermediate_layers_contract"  # added by timm 1.0.31
if Version(timm.__version__) >= Version("1.0.31"):
    TESTS.append(PRUNE)
# Run on every model with included weights; timm leaves them out on GitHub, where they would download.
PRETRAINED = ["test_model_load_pretrained", "test_model_features_pretrained"]
TAGGED = timm.list_pretrained("pale*")
# TorchScript is deprecated and not offered.
LEFT_OUT = ["test_model_forward_torchscript", "test_model_forward_fx_torchscript"]


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> ModuleType:
    """timm's test file as a module that includes the models of this package."""
    name = f"timm-{timm.__version__}"
    try:
        archive = source_distribution(name)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{name}.tar.gz is not in {CACHE} and cannot be downloaded: {error}")
    path = tmp_path_factory.mktemp("timm") / "timm_test_models.py"
    with tarfile.open(archive) as tar:
        source = tar.extractfile(f"{name}/tests/test_models.py")
        assert source is not None
        path.write_bytes(source.read())
    for mark in sorted(set(re.findall(r"\bmark\.(\w+)", path.read_text()))):
        pytestconfig.addinivalue_line("markers", f"{mark}: timm's own")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with models_listed_as_swin():
        spec.loader.exec_module(module)
    return module


def source_distribution(name: str) -> Path:
    """`name`.tar.gz in the cache, downloaded if necessary; safe with several processes."""
    archive = CACHE / f"{name}.tar.gz"
    if not archive.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                "timm",
            ]
            requirement = name.replace("-", "==")
            subprocess.run([*command, "-d", folder, requirement], check=True, timeout=300)
            os.replace(
                shutil.move(Path(folder) / archive.name, f"{archive}.{os.getpid()}"), archive
            )
    return archive


def calls(test: FunctionType) -> dict[str, dict[str, object]]:
    """The arguments with which timm runs `test` on the models of this package, by model."""
    lists = {
        mark.args[0]: mark.args[1]
        for mark in getattr(test, "pytestmark", [])
        if mark.name == "parametrize"
    }
    names = [name for name in lists.get("model_name", []) if name.partition(".")[0] in MODELS]
    if not names:
        return {}
    others = {key: values[0] for key, values in lists.items() if key != "model_name"}
    fixtures = {"cfg_device": "meta"} if "cfg_device" in test.__code__.co_varnames else {}
    return {name.partition(".")[0]: {"model_name": name, **others, **fixtures} for name in names}


def test_timm_chooses_all_four_models_for_these_tests_and_no_others(suite: ModuleType) -> None:
    chosen = {
        name: set(calls(test))
        for name, test in vars(suite).items()
        if isinstance(test, FunctionType)
    }
    chosen = {name: models for name, models in chosen.items() if models}
    with_weights = {name.partition(".")[0] for name in TAGGED}
    found = {name: chosen.pop(name) for name in PRETRAINED if name in chosen}
    assert found == (
        {} if "GITHUB_ACTIONS" in os.environ else dict.fromkeys(PRETRAINED, with_weights)
    )
    assert chosen == dict.fromkeys(TESTS + LEFT_OUT, MODELS)


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize(
    "test", [pytest.param(test, marks=[pytest.mark.slow] * (test == PRUNE)) for test in TESTS]
)
def test_timm_test_passes(suite: ModuleType, test: str, model: str) -> None:
    function = getattr(suite, test)
    try:
        function(**calls(function)[model])
    except pytest.skip.Exception as skipped:
        pytest.fail(f"timm skipped its {test} on {model}: {skipped}")


@pytest.mark.skipif("GITHUB_ACTIONS" in os.environ, reason="timm leaves these tests out there")
@pytest.mark.parametrize("model", TAGGED)
@pytest.mark.parametrize("test", PRETRAINED)
def test_timm_test_of_pretrained_weights_passes(suite: ModuleType, test: str, model: str) -> None:
    getattr(suite, test)(model_name=model, batch_size=1)
