"""A broker for each protocol; and what CI takes of the cases that `make chaos` runs on every broker."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from semel.broker.process import Broker

SAMPLE = "SEMEL_SPARK_SAMPLE"
SAMPLED = ("test_spark_cluster", "test_spark_crashes", "test_spark_twins", "test_spark_upsets")
"""`test_spark_kills` deals out its kills over the brokers by itself."""


@pytest.fixture(scope="module", params=[2, 0], ids=["protocol 2", "protocol 1"])
def bootstrap(request: pytest.FixtureRequest) -> Iterator[str]:
    with Broker(config={"transaction.version": request.param}) as broker:
        yield broker.bootstrap


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In CI each case runs once, the brokers in turn."""
    if not os.environ.get(SAMPLE):
        return
    cases: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.path.stem in SAMPLED:
            name, _, parameters = item.nodeid.partition("[")
            broker, _, rest = parameters.rstrip("]").partition("-")
            cases.setdefault(f"{name}[{rest}", {})[broker] = item
    kept = {list(by_broker.values())[number % len(by_broker)] for number, by_broker in enumerate(cases.values())}
    left = {item for by_broker in cases.values() for item in by_broker.values()} - kept
    config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
    items[:] = [item for item in items if item not in left]
