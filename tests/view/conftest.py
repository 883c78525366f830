from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import launched


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found
