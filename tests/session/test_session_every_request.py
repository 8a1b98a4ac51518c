"""Every request of a session's cycle goes wrong once: late, cut before or after it is carried out, or repeated.

Over two adjacent transactions, so that what is left over from the first one meets the second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import replace

import pytest
from session_scene import BROKER_CONFIG, Pipeline, copy_turn, wait_until

from semel.broker.connection import Connection
from semel.broker.context import Answer
from semel.broker.dispatch import Request, serve
from semel.broker.faults import Cut, Delay, Fault
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api

pytestmark = pytest.mark.chaos

CYCLE = {
    Api.INIT_PRODUCER_ID: 1,
    Api.FIND_COORDINATOR: 2,
    Api.JOIN_GROUP: 2,
    Api.SYNC_GROUP: 1,
    Api.HEARTBEAT: 3,
    Api.CONSUMER_GROUP_HEARTBEAT: 4,
    Api.OFFSET_FETCH: 1,
    Api.LIST_OFFSETS: 1,
    Api.METADATA: 2,
    Api.FETCH: 3,
    Api.ADD_PARTITIONS_TO_TXN: 2,
    Api.PRODUCE: 2,
    Api.ADD_OFFSETS_TO_TXN: 2,
    Api.TXN_OFFSET_COMMIT: 2,
    Api.END_TXN: 2,
}
"""How many requests of each kind the two transactions may make; each is struck in its own run."""
CLASSIC_ONLY = {Api.JOIN_GROUP, Api.SYNC_GROUP, Api.HEARTBEAT}
PROTOCOL_1_ONLY = {Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN}


class Repeat:
    """It is carried out twice, as when a network delivers it again; the second answer is the one that is seen."""

    async def serve(self, connection: Connection, request: Request) -> Answer:
        copy = replace(request, frame=bytearray(request.frame))  # the broker stamps offsets into the frame itself
        for one in (copy, request):
            reply = serve(connection.broker, connection, one)
            answer = await reply if isinstance(reply, Awaitable) else reply
        return answer


FAULTS: dict[str, Fault] = {
    "delayed": Delay(150),
    "cut before": Cut(carried_out=False),
    "cut after": Cut(carried_out=True),
    "repeated": Repeat(),
}


@pytest.fixture(scope="module", params=[2, 1], ids=["protocol-2", "protocol-1"])
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    config = {**BROKER_CONFIG, "transaction.version": str(request.param)}
    with EmbeddedBroker(config=config, fsync="never") as broker:
        yield broker


@pytest.mark.parametrize("protocol", ["cooperative-sticky", "consumer"])
@pytest.mark.parametrize("what", FAULTS)
def test_two_transactions_are_exact_though_any_one_request_goes_wrong(
    broker: EmbeddedBroker, protocol: str, what: str
) -> None:
    """Bar 3, D1, D5: each record is in the output once and the offsets are at the end."""
    struck = 0
    for api, count in CYCLE.items():
        if api in CLASSIC_ONLY and protocol == "consumer":
            continue
        for skip in range(count):
            pipeline = Pipeline(broker.bootstrap, protocol, partitions=1)
            pipeline.write(range(20))
            fault = broker.faults.inject(api, FAULTS[what], skip=skip)
            with pipeline.session(transaction_records_max=10, retry_backoff_ms=5) as session:
                wait_until(
                    lambda p=pipeline, s=session: copy_turn(s, p, 100) >= 0 and s.committed_count >= 2,
                    f"{api.name} {skip}",
                )
            broker.faults.clear()
            struck += fault.served
            assert (api.name, skip, pipeline.counts()) == (api.name, skip, Counter(range(20)))
            assert (api.name, skip, pipeline.committed()) == (api.name, skip, {0: 20})
            assert pipeline.open_transactions() == []
    assert struck >= 15
