"""What CI takes of the cases that `make chaos` runs on every broker: each of them once, the brokers in turn."""

from __future__ import annotations

import os
from itertools import cycle

import pytest

SAMPLE = "SEMEL_SPARK_SAMPLE"
SAMPLED = ("test_spark_cluster", "test_spark_crashes", "test_spark_upsets")
"""`test_spark_kills` deals out its kills over the brokers by itself."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not os.environ.get(SAMPLE):
        return
    cases: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if item.path.stem in SAMPLED:
            name, _, parameters = item.nodeid.partition("[")
            broker, _, rest = parameters.rstrip("]").partition("-")
            cases.setdefault(f"{name}[{rest}", {})[broker] = item
    turns = cycle(range(6))  # as often even as a multiple of three
    kept: set[pytest.Item] = set()
    for by_broker in cases.values():
        brokers = list(by_broker.values())
        kept.add(brokers[next(turns) % len(brokers)] if len(brokers) > 1 else brokers[0])
    left = {item for by_broker in cases.values() for item in by_broker.values()} - kept
    config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
    items[:] = [item for item in items if item not in left]
