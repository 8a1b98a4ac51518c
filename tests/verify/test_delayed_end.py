"""The hole of transaction protocol 1: an EndTxn that is late ends the *next* transaction. Who falls into it, counted.

The same scene for every client, by a proxy that holds back one request: the commit of a transaction gets no answer, the
client connects anew and commits again, with success. While it writes the next transaction, the late EndTxn reaches the
broker; then the client aborts, and is told that it has. Whatever of an aborted transaction readers see is counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import confluent_kafka
import pytest
from kio.schema.errors import ErrorCode

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.records.reference import Record, encode_batch
from semel.testing.exchange import exchange, parse_bootstrap
from semel.verify.chaos_reading import read_by_requests
from semel.verify.faults.proxy import FaultProxy, Hold, Match, Trap
from semel.verify.simulated_network import make_request
from semel.wire import Api
from semel.wire.messages import response_type_for

TOPIC = "payments"
ROUNDS = 3
TIMEOUT_MS = 400
HELD_MS = 60_000


class Client(Protocol):
    """A transactional producer, whatever its library."""

    def begin(self) -> None: ...
    def write(self, value: str, partition: int) -> None:
        """Return when the broker has it."""

    def commit(self) -> None:
        """Return when it is committed, over a lost connection too."""

    def abort(self) -> None: ...
    def close(self) -> None: ...


class RawClient:
    """The requests of protocol 1 by the book, each on a connection of its own, again when no answer comes."""

    def __init__(self, bootstrap: str, name: str) -> None:
        (self._address,) = parse_bootstrap(bootstrap)
        self._name = name
        answer = self._settled(
            Api.INIT_PRODUCER_ID,
            3,
            transactional_id=name,
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        self._identity = {"producer_id": answer.producer_id, "producer_epoch": answer.producer_epoch}
        self._sequences = Counter[int]()

    def begin(self) -> None:
        """Nothing is sent for it."""

    def write(self, value: str, partition: int) -> None:
        self._settled(
            Api.ADD_PARTITIONS_TO_TXN,
            3,
            code=lambda answer: answer.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code,
            v3_and_below_transactional_id=self._name,
            v3_and_below_producer_id=self._identity["producer_id"],
            v3_and_below_producer_epoch=self._identity["producer_epoch"],
            v3_and_below_topics=[{"name": TOPIC, "partitions": [partition]}],
        )
        record = Record(0, time.time_ns() // 1_000_000, None, value.encode())
        sequence, self._sequences[partition] = self._sequences[partition], self._sequences[partition] + 1
        batch = encode_batch([record], base_sequence=sequence, transactional=True, **self._identity)
        self._settled(
            Api.PRODUCE,
            9,
            code=lambda answer: answer.responses[0].partition_responses[0].error_code,
            transactional_id=self._name,
            acks=-1,
            timeout=5_000,
            topic_data=[{"name": TOPIC, "partition_data": [{"index": partition, "records": batch}]}],
        )

    def commit(self) -> None:
        assert self._end(committed=True) is ErrorCode.none

    def abort(self) -> None:
        assert self._end(committed=False) is ErrorCode.none

    def close(self) -> None:
        """Every request had a connection of its own."""

    def _end(self, *, committed: bool) -> ErrorCode:
        fields = {"transactional_id": self._name, "committed": committed, **self._identity}
        return self._settled(Api.END_TXN, 3, code=lambda _: ErrorCode.none, **fields).error_code

    def _settled(
        self,
        api: Api,
        version: int,
        code: Callable[[Any], ErrorCode] = lambda answer: answer.error_code,
        **fields: Any,
    ) -> Any:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with suppress(TimeoutError):
                request = make_request(api, version, fields)
                answer = exchange(self._address, request, response_type_for(request), timeout_s=TIMEOUT_MS / 1000)
                if code(answer) is ErrorCode.none:
                    return answer
        raise AssertionError(f"{api.name} did not succeed")


class LibrdkafkaClient:
    """librdkafka, which has protocol 1 only."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": name,
                "socket.timeout.ms": TIMEOUT_MS,
                "transaction.timeout.ms": 60_000,
                "message.timeout.ms": 60_000,
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        self._producer.init_transactions(20)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def write(self, value: str, partition: int) -> None:
        self._producer.produce(TOPIC, value.encode(), partition=partition)
        assert self._producer.flush(20) == 0

    def commit(self) -> None:
        self._producer.commit_transaction(20)

    def abort(self) -> None:
        self._producer.abort_transaction(20)

    def close(self) -> None:
        self._producer.purge()


class SemelClient:
    """Semel's producer, which speaks the protocol that the cluster has."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": name,
                "request.timeout.ms": TIMEOUT_MS,
                "delivery.timeout.ms": 20_000,
                "default.api.timeout.ms": 20_000,
            }
        )

    def begin(self) -> None:
        self._producer.begin()

    def write(self, value: str, partition: int) -> None:
        self._producer.send(TOPIC, value.encode(), partition=partition)
        self._producer.flush()

    def commit(self) -> None:
        self._producer.commit()

    def abort(self) -> None:
        self._producer.abort()

    def close(self) -> None:
        self._producer.close()


@pytest.fixture(params=[1, 2], ids=["protocol 1", "protocol 2"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    config = {"transaction.version": request.param, "transaction.state.log.num.partitions": 1}
    with Broker(fsync="never", config=config) as made:
        with Admin({"bootstrap.servers": made.bootstrap}) as admin:
            admin.create_topics(TOPIC, partitions=2)
        yield made


def play(broker: Broker, make: Callable[[str, str], Client], number: int) -> None:
    """One round of the scene."""
    with FaultProxy(broker.bootstrap) as proxy:
        client = make(proxy.bootstrap, f"writer-{number}")
        client.begin()
        client.write(f"committed {number}", 0)
        late = proxy.set_trap(Match(Api.END_TXN), Hold(HELD_MS))
        client.commit()
        assert late.wait_struck(0), "the commit was never held back"
        assert late.ended_ns is None, "the commit succeeded by the very request that is held back"
        client.begin()
        client.write(f"aborted {number}", 0)
        deliver(late)
        client.write(f"aborted {number}", 1)
        client.abort()
        client.close()


def deliver(late: Trap) -> None:
    """Let the old EndTxn reach the broker, and wait until the broker has answered it."""
    late.release()
    assert late.wait_over(20)


def visible(broker: Broker) -> Counter[str]:
    """How many records of each kind readers of committed records see."""
    partitions = read_by_requests(broker.bootstrap, [(TOPIC, 0), (TOPIC, 1)]).values()
    return Counter(value.split()[0] for records in partitions for _, value in records)


@pytest.mark.parametrize("broker", [1], ids=["protocol 1"], indirect=True)
@pytest.mark.parametrize("make", [RawClient, LibrdkafkaClient])
def test_on_protocol_1_a_late_end_commits_what_the_client_aborts(
    broker: Broker, make: Callable[[str, str], Client]
) -> None:
    """Each round shows readers one of the two records that its client has aborted, and no error tells anybody."""
    for number in range(ROUNDS):
        play(broker, make, number)
    assert visible(broker) == {"committed": ROUNDS, "aborted": ROUNDS}


def test_a_late_end_never_reaches_the_next_transaction_of_semels_client(broker: Broker) -> None:
    """The same scene on both protocols: all that was committed is there, nothing that was aborted."""
    for number in range(ROUNDS):
        play(broker, SemelClient, number)
    assert visible(broker) == {"committed": ROUNDS}
