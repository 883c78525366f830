import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The same examples every time, so that a change is judged by itself; HYPOTHESIS_PROFILE=default draws new ones.
# No example has a time limit of its own: it would be one of the machine, and tests have theirs.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Two xdist workers on two cores: one thread each.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    # Long ones first, or one worker would be left with them at the end.
    items.sort(key=lambda item: "slow" not in item.keywords)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def project() -> Path:
    """The project's root folder."""
    return Path(__file__).parent.parent
