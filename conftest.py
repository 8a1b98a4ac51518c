"""One seed for all random tests of a run: a new one each time, printed at the top, and SEMEL_SEED repeats it."""

from __future__ import annotations

import os
import random

import pytest


def pytest_configure() -> None:
    os.environ.setdefault("SEMEL_SEED", str(random.randrange(1_000_000)))


def pytest_report_header() -> str:
    return f"random tests: SEMEL_SEED={os.environ['SEMEL_SEED']}"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness of one test's own, repeated by SEMEL_SEED."""
    seed = f"{os.environ['SEMEL_SEED']}-{request.node.name}"
    print(f"seed {seed} (repeat with SEMEL_SEED={os.environ['SEMEL_SEED']})")
    return random.Random(seed)
