"""A worker that dies at a request of its own: the moment is exact, and what became of the request is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from driven_faults import Sleepers, carried_out, driver_of, fault, new_topic, values, wait_until, what_is_seen
from raw_connection import RawConnection

from semel.errors import ConfigError
from semel.verify.faults.kinds import FaultKind
from semel.verify.faults.proxy import FaultProxy
from semel.verify.faults.targets import EmbeddedTarget


@pytest.fixture(scope="module")
def target() -> Iterator[EmbeddedTarget]:
    with EmbeddedTarget(fsync="never") as made:
        yield made


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Sleepers]:
    made = Sleepers(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_dies_while_its_request_is_on_the_way(
    target: EmbeddedTarget, tmp_path: Path, workers: Sleepers, when: str
) -> None:
    """The request arrives or does not, as the plan says; the worker lives again, and requests of others pass."""
    topic, process_id = new_topic(target.bootstrap), workers.process_id("one")
    crash = fault(FaultKind.CRASH, 0, api="PRODUCE", client_id="victim", victim="one", nth=1, when=when)
    with (
        FaultProxy(target.bootstrap) as proxy,
        driver_of(target, tmp_path, crash, proxy=proxy, workers=workers) as driver,
    ):
        wait_until(lambda: proxy.waiting_traps == 1)
        with RawConnection(proxy.bootstrap, client_id="other") as other:
            other.send_record(topic, "passes")
            assert what_is_seen(other) == "answered"
        with RawConnection(proxy.bootstrap, client_id="victim") as client:
            client.send_record(topic, "last")
            record = carried_out(driver, tmp_path)
            if when == "after":
                assert what_is_seen(client) == "answered", "it has reached the broker"
    assert (record.outcome, workers.process_id("one") in (None, process_id)) == ("done", False)
    assert "PRODUCE" in record.note
    assert values(target.bootstrap, topic) == (["passes", "last"] if when == "after" else ["passes"])


def test_a_crash_without_workers_is_refused(target: EmbeddedTarget, tmp_path: Path) -> None:
    """Before anything is started: there is nobody to kill."""
    crash = fault(FaultKind.CRASH, 0, api="PRODUCE", client_id="victim", victim="one", nth=1, when="after")
    with FaultProxy(target.bootstrap) as proxy, pytest.raises(ConfigError, match="there are no worker processes"):
        driver_of(target, tmp_path, crash, proxy=proxy)
