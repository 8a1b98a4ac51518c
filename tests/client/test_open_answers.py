"""Answers that leave it open whether a request will be carried out: a refusal after them proves nothing."""

from __future__ import annotations

import pytest

from semel.broker.faults import Error
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Outcome, Producer
from semel.errors import CommitUnknown
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api, ErrorCode


@pytest.mark.parametrize("protocol", ["2", "0"])
@pytest.mark.parametrize("code", [ErrorCode.coordinator_not_available, ErrorCode.not_coordinator])
def test_a_commit_that_was_refused_after_an_open_answer_is_found_out(protocol: str, code: ErrorCode) -> None:
    """B9: a coordinator that times out has often written the decision; its successor carries it out, and a new owner
    may come before our repeat. (Simulation, seed 131 with 200 transactions.)
    """
    with EmbeddedBroker(config={"transaction.version": protocol}) as broker:
        to = {"bootstrap.servers": broker.bootstrap}
        with Admin(to) as admin:
            admin.create_topics("orders", partitions=1)
        with Producer(to, transactional_id="t") as producer:
            producer.begin()
            producer.send("orders", b"once")
            broker.faults.inject(Api.END_TXN, Error(code, carried_out=True))
            broker.faults.inject(Api.END_TXN, Error(ErrorCode.producer_fenced))
            with pytest.raises(CommitUnknown):
                producer.commit()
            assert producer.resolve() is Outcome.COMMITTED
        with Fetcher(to) as fetcher:
            fetcher.assign({("orders", 0): "earliest"})
            [table] = fetcher.read_until(fetcher.end_offsets())
        assert table["value"].to_pylist() == [b"once"]
