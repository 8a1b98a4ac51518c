"""Brokers of both transaction protocols, and a Postgres, for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from both_scene import Shop, shops

from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    with Postgres(settings={"max_connections": "50"}) as server:
        yield server


@pytest.fixture(scope="session", params=[2, 1], ids=["protocol-2", "protocol-1"])
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config={"transaction.version": str(request.param)}, fsync="never") as broker:
        yield broker


@pytest.fixture(params=[0, 1], ids=["sqlite", "postgres"])
def shop(request: pytest.FixtureRequest, tmp_path: Path, broker: EmbeddedBroker, server: Postgres) -> Shop:
    made = list(shops(tmp_path, broker.bootstrap, server))[request.param]
    made.set_up()
    return made
