"""The pytest plugin: `semel_broker`, a real Kafka broker for any client's tests, started when first asked for.

Loaded by pytest in every environment that has Semel installed, so it imports nothing of Semel until a test wants it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from semel.broker.process import Broker


@pytest.fixture(scope="session")
def semel_broker_config() -> dict[str, object]:
    """Settings of `semel_broker` under Kafka's names. Override it in a conftest.py to change them."""
    return {}


@pytest.fixture(scope="session")
def semel_broker(semel_broker_config: dict[str, object]) -> Iterator[Broker]:
    """A Kafka broker for this test session; `semel_broker.bootstrap` is for a client's `bootstrap.servers`.

    It runs in its own process, keeps its data in a temporary folder, and leaves nothing behind. Topics come into being
    by being used; take new names in each test, since all of them share the broker.
    """
    from semel.broker.process import Broker

    # Tests want speed; there is no power cut to survive in a temporary folder.
    with Broker(config=semel_broker_config, fsync="never") as broker:
        yield broker
