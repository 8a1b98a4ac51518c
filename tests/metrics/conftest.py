"""Log lines of these tests have the fields that the test gives them, whatever tests before it have left open."""

from __future__ import annotations

from contextvars import ContextVar

import pytest

from semel import logs


@pytest.fixture(autouse=True)
def no_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_innermost", ContextVar[object]("fields_of_a_test", default=None))
