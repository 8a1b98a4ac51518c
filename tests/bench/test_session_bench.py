"""`semel bench session`, in small, on the embedded broker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest

from semel.bench.client import PARTITIONS, new_topic
from semel.bench.copiers import DEFAULTS, SHAPES, TUNINGS, copy_by_confluent, copy_by_session, fill
from semel.bench.session import run
from semel.bench.singles import VALUE, JavaClientFailed, Sizes, java_client, measure_rates, semel_client
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer


def test_all_ways_have_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is there, every rate was measured, and the report says how the peer was tuned."""
    with Broker(fsync="never", config={"group.initial.rebalance.delay.ms": "0"}) as broker:
        monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", broker.bootstrap)
        monkeypatch.setattr("semel.bench.session.TRIAL_ROUNDS", 1)
        monkeypatch.setattr("semel.bench.session.TUNINGS", TUNINGS[:1])
        section = run(records=200, rounds=1, singles=Sizes(turn=3, warm_up_turns=1, turns=2), java=False)
    figures = {row.case: row.figures for row in section.rows}
    assert len(figures) == 2 * 3 + 4
    unmeasured = {case for case, (rate, *_) in figures.items() if rate is None}
    assert unmeasured == {case for case in figures if case.endswith("Java client")}
    for case, (best, middle, times, _) in figures.items():
        if "confluent" in case:
            assert best is not None
            assert middle is not None
            assert best == middle > 0
        if case.endswith("semel.Session") and "one record" not in case:
            assert times == 1.0
    assert [bar.measured is None for bar in section.bars] == [False, False, False, True, True]
    assert not section.passed
    for shape in SHAPES:
        (told,) = [note for note in section.notes if f"tuned, {shape} records" in note]
        assert told.endswith(TUNINGS[0].settings())


@pytest.fixture(scope="module")
def ragged() -> Iterator[tuple[str, str]]:
    with Broker(fsync="never", config={"group.initial.rebalance.delay.ms": "0"}) as broker:
        source = new_topic(broker.bootstrap, "ragged")
        fill(broker.bootstrap, source, 3_000, "ragged")
        yield broker.bootstrap, source


def contents(bootstrap: str, topic: str) -> Counter[tuple[bytes, bytes]]:
    with Fetcher({"bootstrap.servers": bootstrap}) as fetcher:
        fetcher.assign({(topic, partition): "earliest" for partition in range(PARTITIONS)})
        table = pa.concat_tables(fetcher.read_until(fetcher.end_offsets()))
    return Counter(zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True))


@pytest.mark.parametrize("way", ["semel", *(tuning.name for tuning in (DEFAULTS, *TUNINGS))])
def test_every_way_copies_every_record_once(way: str, ragged: tuple[str, str]) -> None:
    """A rate counts only if the job was done: each record of the input is in the output once, in upper case."""
    bootstrap, source = ragged
    if way == "semel":
        _, target = copy_by_session(bootstrap, source, 3_000)
    else:
        (tuning,) = [one for one in (DEFAULTS, *TUNINGS) if one.name == way]
        _, target = copy_by_confluent(bootstrap, source, 3_000, tuning)
    read = contents(bootstrap, source)
    assert len({len(value) for _, value in read}) > 100
    assert contents(bootstrap, target) == Counter({(key, value.upper()): n for (key, value), n in read.items()})


@pytest.mark.conformance
def test_the_java_client_does_the_same_one_record_transactions() -> None:
    """What it is asked for is what it does: every record of the input is in the output, once by each client."""
    sizes = Sizes(turn=3, warm_up_turns=1, turns=2)
    with Broker(fsync="never", config={"group.initial.rebalance.delay.ms": "0"}) as broker:
        to = {"bootstrap.servers": broker.bootstrap}
        with Admin(to) as admin:
            admin.create_topics("in", "out", partitions=2)
        with Producer(to) as producer:
            producer.send_table("in", pa.table({"value": [b"record %d" % n for n in range(sizes.records)]}))
        with (
            semel_client(broker.bootstrap, "in", "out") as semel,
            java_client(broker.bootstrap, "in", "out") as java,
        ):
            rates = measure_rates({"semel": semel, "java": java}, sizes)
        with Fetcher(to) as fetcher:
            fetcher.assign({("out", 0): "earliest", ("out", 1): "earliest"})
            values = pa.concat_tables(fetcher.read_until(fetcher.end_offsets())).column("value").to_pylist()
    assert all(rate > 0 for rate in rates.values())
    assert len(rates) == 4
    copies = Counter({b"RECORD %d" % n: 2 for n in range(sizes.records)})
    assert Counter(values) == copies + Counter({VALUE: 2 * sizes.records})


@pytest.mark.conformance
def test_a_java_client_that_fails_says_why() -> None:
    """Its last words are in the message, rather than a number that is missing."""
    with java_client("nowhere", "in", "out") as java, pytest.raises(JavaClientFailed, match="bootstrap"):
        java["produce"](1)
