"""`semel demo`: see what Semel does, in half a minute."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import pyarrow as pa
import typer
from rich.console import Console
from rich.table import Table

from semel.errors import SemelError
from semel.records import decode_batches, encode_control_batch, encode_table, iter_batches, stamp

ROWS = 200_000
PAYMENTS = 1_000
CUT_ONE_IN = 7
SEED = 7


def demo(
    kafka: Annotated[
        bool, typer.Option("--kafka", help="Use Apache Kafka instead of the embedded broker (Java 17+, Maven).")
    ] = False,
) -> None:
    """Show record batches, transactions and damage in memory, and a broker behind a bad network."""
    console = Console()
    _show_codec(console)
    _show_transactions(console)
    _show_damage(console)
    _show_bad_network(console, with_apache=kafka)


def _show_codec(console: Console) -> None:
    console.rule("1. Arrow in, Kafka's record batches out, and back")
    table = pa.table({"key": [b"%08d" % row for row in range(ROWS)], "value": [b"%0100d" % row for row in range(ROWS)]})
    started = time.perf_counter()
    batches = encode_table(table, compression="zstd", default_timestamp_ms=0)
    encoded = time.perf_counter()
    decoded = decode_batches([memoryview(batch.data) for batch in batches])
    done = time.perf_counter()
    assert decoded.column("value").combine_chunks().equals(table.column("value").combine_chunks())
    size = sum(len(batch.data) for batch in batches)
    console.print(
        f"{ROWS:,} records -> {len(batches)} batches, {size:,} bytes with zstd in {(encoded - started) * 1000:.0f} ms; "
        f"back to an equal table in {(done - encoded) * 1000:.0f} ms, checksums included."
    )


def _show_transactions(console: Console) -> None:
    """A partition's log with a committed and an aborted transaction in each other's way, as two readers see it."""
    from semel.client.visibility import AbortedTransaction, Visibility

    console.rule("2. Two transactions in one partition: one commits, one aborts")
    log = b"".join(
        [
            _batch(0, producer_id=1, value=b"order 1: 10 EUR"),
            _batch(1, producer_id=2, value=b"order 2: 99 EUR (its process crashed)"),
            _batch(2, producer_id=1, value=b"order 3: 20 EUR"),
            _marker(3, "abort", producer_id=2),
            _marker(4, "commit", producer_id=1),
        ]
    )
    visibility = Visibility([AbortedTransaction(producer_id=2, first_offset=1)])
    shown = Table("offset", "in the log", "read_uncommitted", "read_committed (Semel's default)")
    for header, batch in iter_batches(log):
        if header.is_control:
            kind = "abort" if header.producer_id == 2 else "commit"
            visibility.admits(header, lambda kind=kind: kind)
            shown.add_row(str(header.base_offset), f"marker: {kind} of producer {header.producer_id}", "", "")
            continue
        value = decode_batches([batch]).column("value")[0].as_py().decode()
        visible = value if visibility.admits(header, lambda: None) else "[dim]hidden[/dim]"
        shown.add_row(str(header.base_offset), f"producer {header.producer_id}", value, visible)
    console.print(shown)


def _batch(offset: int, *, producer_id: int, value: bytes) -> bytes:
    (encoded,) = encode_table(pa.table({"value": [value]}), default_timestamp_ms=0)
    data = bytearray(encoded.data)
    stamp(data, producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True)
    data[:8] = offset.to_bytes(8, "big")  # the leader sets it; it is outside of the checksum
    return bytes(data)


def _marker(offset: int, kind: str, *, producer_id: int) -> bytes:
    outcome = "abort" if kind == "abort" else "commit"
    return encode_control_batch(
        outcome, producer_id=producer_id, producer_epoch=0, coordinator_epoch=0, timestamp_ms=0, base_offset=offset
    )


def _show_damage(console: Console) -> None:
    console.rule("3. Damaged bytes never pass for records")
    (batch,) = encode_table(pa.table({"value": [b"x" * 1_000]}), default_timestamp_ms=0)
    flipped = bytearray(batch.data)
    flipped[500] ^= 1
    for what, data in (("one bit flipped", flipped), ("cut in the middle", bytearray(batch.data)[:500])):
        try:
            decode_batches([memoryview(data)])
        except SemelError as error:
            console.print(f"{what}: [red]{type(error).__name__}[/red] {error}")
        else:
            raise AssertionError(f"{what} went unnoticed")


def _show_bad_network(console: Console, *, with_apache: bool) -> None:
    """The same payments over connections that are cut at random frames, with plain retries and with Semel's."""
    from semel.broker.process import Broker
    from semel.client.producer import Producer
    from semel.testing.apache_kafka import ApacheKafka

    console.rule(f"4. {PAYMENTS:,} payments, the connection cut at one frame in {CUT_ONE_IN}")
    name = "Apache Kafka" if with_apache else "the embedded broker"
    with console.status(f"starting {name}"):
        kafka = ApacheKafka() if with_apache else Broker()
        kafka.start()

    def naive(bootstrap: str, topic: str) -> None:
        settings = {"enable.idempotence": False, "acks": 1, "batch.size": 1_000, "retry.backoff.ms": 1}
        with Producer({"bootstrap.servers": bootstrap, **settings}) as producer:
            for payment in range(PAYMENTS):
                producer.send(topic, b"payment %d" % payment)
                producer.flush()

    def exactly_once(bootstrap: str, topic: str) -> None:
        settings = {"transactional.id": topic, "batch.size": 1_000, "retry.backoff.ms": 1}
        with Producer({"bootstrap.servers": bootstrap, **settings}) as producer:
            for first in range(0, PAYMENTS, 20):
                with producer.transaction():
                    for payment in range(first, first + 20):
                        producer.send(topic, b"payment %d" % payment)

    shown = Table("producer", "sent", "cuts", "in the topic", "lost", "twice or more")
    try:
        for name, write in (("plain retries", naive), ("Semel, transactions", exactly_once)):
            with console.status(name):
                shown.add_row(name, *map(str, _payments_through_cuts(kafka.bootstrap, write)))
    finally:
        kafka.close()
    console.print(shown)


def _payments_through_cuts(bootstrap: str, write: Callable[[str, str], None]) -> tuple[int, int, int, int, int]:
    from semel.client.admin import Admin
    from semel.client.fetcher import Fetcher
    from semel.testing.proxy import Cut, KafkaProxy, Passage
    from semel.wire import Api

    topic = f"payments-{time.time_ns()}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=1)
    cuts = 0
    chance = random.Random(SEED)

    def decide(passage: Passage) -> Cut | None:
        nonlocal cuts
        if passage.api_key == Api.API_VERSIONS or chance.randrange(CUT_ONE_IN):
            return None
        cuts += 1
        return Cut.BEFORE

    with KafkaProxy(bootstrap) as proxy:
        proxy.decide = decide
        write(proxy.bootstrap, topic)
    with Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
        fetcher.assign({(topic, 0): 0})
        found = Counter(
            value for table in fetcher.read_until(fetcher.end_offsets()) for value in table.column("value").to_pylist()
        )
    lost = sum(b"payment %d" % payment not in found for payment in range(PAYMENTS))
    return PAYMENTS, cuts, found.total(), lost, sum(count > 1 for count in found.values())
