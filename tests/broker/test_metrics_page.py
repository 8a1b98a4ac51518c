"""The numbers for Prometheus are the broker's own, and can be read with any HTTP client on this machine."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from prometheus_client.parser import text_string_to_metric_families

import semel
from semel.broker.metrics_page import serve_metrics, write_page
from semel.broker.pacing import finish_now
from semel.errors import ConfigError
from semel.metrics.families import Family, Kind
from semel.records.reference import Record, encode_batch
from semel.testing.embedded import EmbeddedBroker
from semel.testing.exchange import exchange
from semel.testing.manual_clock import ManualClock
from semel.wire.api import Api
from semel.wire.messages import build, response_type_for


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(clock=ManualClock(), fsync="never") as broker:
        yield broker


@pytest.fixture
def port(broker: EmbeddedBroker) -> Iterator[int]:
    server = broker.call(lambda: serve_metrics(broker.broker, 0))
    yield server.sockets[0].getsockname()[1]
    broker.call(server.close)


def ask(port: int, method: str = "GET", path: str = "/metrics") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def values(port: int) -> dict[tuple[str, ...], float]:
    """All samples, by name and label values, which are in the order of the labels' names."""
    status, text = ask(port)
    assert status == 200
    return {
        (
            sample.name.removeprefix("semel_broker_"),
            *(value for _, value in sorted(sample.labels.items())),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def request(broker: EmbeddedBroker, api: Api, version: int, **fields: Any) -> Any:
    message = build(api, version, **fields)
    return exchange(("127.0.0.1", broker.ports[0]), message, response_type_for(message))


def test_a_transaction_is_seen_from_its_beginning_to_its_end(broker: EmbeddedBroker, port: int) -> None:
    """Open, its age and how far readers are behind; then committed, and nobody waits any more."""
    config = {"bootstrap.servers": broker.bootstrap}
    with semel.Admin(config) as admin:
        admin.create_topics("orders")
    with semel.Producer({**config, "transactional.id": "t"}) as producer:
        producer.begin()
        for number in range(3):
            producer.send("orders", value=b"%d" % number)
        producer.flush()
        broker.clock.advance(ms=5_000)
        seen = values(port)
        assert seen["open_transactions",] == 1
        assert seen["oldest_open_transaction_seconds",] == 5
        assert seen["last_stable_offset_lag", "0", "orders"] == 3
        assert (seen["records_appended_total",], seen["log_end_offset", "0", "orders"]) == (3, 3)
        assert seen["producer_states",] == 1
        assert seen["producer_state_bytes",] > 0
        assert seen["connections",] >= 1
        producer.commit()
    seen = values(port)
    assert (seen["open_transactions",], seen["oldest_open_transaction_seconds",]) == (0, 0)
    assert seen["last_stable_offset_lag", "0", "orders"] == 0
    assert (seen["transactions_committed_total",], seen["transactions_aborted_total",]) == (1, 0)
    assert seen["bytes_appended_total",] > 0
    assert seen["log_size_bytes", "0", "orders"] >= seen["bytes_appended_total",]
    assert seen["requests_total", "END_TXN"] == 1
    assert (seen["storage_errors_total",], seen["unexpected_errors_total",]) == (0, 0)


def test_refusals_are_counted_by_their_code(broker: EmbeddedBroker, port: int) -> None:
    """A producer that nobody knows; and a group, by kind and state."""
    answer = request(broker, Api.END_TXN, 3, transactional_id="nobody", producer_id=1, producer_epoch=0, committed=True)
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics("orders")
        admin.commit_offsets("g", {("orders", 0): 0})
    seen = values(port)
    assert seen["refusals_total", answer.error_code.name] == 1
    assert seen["groups", "Empty", "classic"] == 1


def produce(broker: EmbeddedBroker, *, producer_epoch: int, base_sequence: int) -> ErrorCode:
    batch = encode_batch(
        [Record(0, broker.clock.now_ms(), None, b"value", ())],
        producer_id=7,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    partition = {"index": 0, "records": batch}
    topics = [{"name": "orders", "partition_data": [partition]}]
    answer = request(broker, Api.PRODUCE, 9, transactional_id=None, acks=-1, timeout=1000, topic_data=topics)
    return answer.responses[0].partition_responses[0].error_code


def test_repeats_gaps_and_fences_have_names_of_their_own(broker: EmbeddedBroker, port: int) -> None:
    """What tells that exactly-once is at work is there from the start, and counts."""
    names = ("duplicates_refused_total", "out_of_order_sequences_total", "fences_total")
    seen = values(port)
    assert [seen[name,] for name in names] == [0, 0, 0]
    with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics("orders")
    codes = [
        produce(broker, producer_epoch=1, base_sequence=0),
        produce(broker, producer_epoch=1, base_sequence=0),
        produce(broker, producer_epoch=1, base_sequence=5),
        produce(broker, producer_epoch=0, base_sequence=1),
    ]
    gap, fenced = ErrorCode.out_of_order_sequence_number, ErrorCode.invalid_producer_epoch
    assert codes == [ErrorCode.none, ErrorCode.none, gap, fenced]
    seen = values(port)
    assert [seen[name,] for name in names] == [1, 1, 1]
    assert seen["records_appended_total",] == 1


def test_a_page_in_pieces_says_the_same_as_one_at_once() -> None:
    """Thousands of values are written a few at a time; a reader must not notice, whatever is in the labels."""
    values = {(f'a\\b"c\n{number}', str(number)): number / 3 for number in range(1_000)}
    for kind in (Kind.GAUGE, Kind.COUNTER):
        family = Family(kind, "many", "Many.", values, ("topic", "partition"))
        parts = [replace(family, values=dict([item])) for item in values.items()]
        (read,) = text_string_to_metric_families(finish_now(write_page([family])).decode())
        expected = [
            sample
            for part in parts
            for one in text_string_to_metric_families(finish_now(write_page([part])).decode())
            for sample in one.samples
        ]
        assert read.samples == expected
    slices = sum(1 for _ in write_page([family]))
    assert slices >= 3, "others have no turn"


def test_only_the_metrics_can_be_read(port: int) -> None:
    """Another path, another method, and a HEAD without a body."""
    assert ask(port, path="/elsewhere")[0] == 404
    assert ask(port, method="POST")[0] == 405
    assert ask(port, method="HEAD") == (200, "")


def test_a_client_that_says_nothing_sensible_is_let_go(broker: EmbeddedBroker, port: int) -> None:
    """Neither half a request nor a huge one disturbs the broker."""
    for garbage in (b"GET /metrics", b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
            client.sendall(garbage)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(1000) == b""
    assert values(port)["unexpected_errors_total",] == 0


def test_a_port_in_use_is_a_config_error(broker: EmbeddedBroker, port: int) -> None:
    """In words, as for the broker's own port."""
    with pytest.raises(ConfigError, match=f"Port {port} of 127.0.0.1 is in use"):
        broker.call(lambda: serve_metrics(broker.broker, port))
