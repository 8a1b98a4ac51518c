"""Named points at which a broker's process dies when a test asks for it, and never otherwise."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import semel
from semel.broker import failpoints
from semel.broker.process import Broker
from semel.errors import BrokerUnreachable, SemelError

SOURCE = Path(failpoints.__file__).parent


def test_a_broker_dies_at_the_named_point_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second topic is stored and its partitions are not made: the next start makes them."""
    monkeypatch.setenv(failpoints.VARIABLE, "after_topic_stored:2")
    with Broker() as broker:
        with semel.Admin({"bootstrap.servers": broker.bootstrap, "default.api.timeout.ms": 2_000}) as admin:
            admin.create_topics("first")
            with pytest.raises(SemelError):
                admin.create_topics("second")
        deadline = time.monotonic() + 30
        while broker.is_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not broker.is_running
        monkeypatch.delenv(failpoints.VARIABLE)
        broker.restart()
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            assert set(admin.list_topics()) == {"first", "second"}


def test_a_point_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name would let a test pass that kills nothing."""
    monkeypatch.setenv(failpoints.VARIABLE, "after_everything")
    broker = Broker()
    with pytest.raises(BrokerUnreachable, match="'after_everything', and there is none"):
        broker.start()
    broker.close()


def test_every_point_is_reached_from_one_place_in_the_source() -> None:
    """A point that was moved away with its code would never be tested again."""
    reached = [
        point for file in SOURCE.rglob("*.py") for point in re.findall(r'^\s+reach\("(\w+)"\)', file.read_text(), re.M)
    ]
    assert sorted(reached) == sorted(failpoints.POINTS)
