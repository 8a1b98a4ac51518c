"""Log lines of these tests have the fields that the test gives them, whatever tests before it have left open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from semel import logs


@pytest.fixture(autouse=True)
def no_fields() -> Iterator[None]:
    before = logs.current_fields()
    logs.set_fields({})
    yield
    logs.set_fields(before)
