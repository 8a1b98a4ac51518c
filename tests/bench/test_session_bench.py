"""`semel bench session`, in small, on the embedded broker."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
import pytest

from semel.bench.session import run
from semel.bench.singles import VALUE, JavaClientFailed, Sizes, java_client, measure_rates, semel_client
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.fetcher import Fetcher
from semel.client.producer import Producer


def test_all_ways_do_the_same_job_and_have_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is there, and every rate is one that was measured."""
    with Broker(fsync="never", config={"group.initial.rebalance.delay.ms": "0"}) as broker:
        monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", broker.bootstrap)
        section = run(records=200, rounds=1, singles=Sizes(turn=3, warm_up_turns=1, turns=2), java=False)
    figures = {row.case: row.figures for row in section.rows}
    assert len(figures) == 7
    unmeasured = {case for case, (rate, _) in figures.items() if rate is None}
    assert unmeasured == {case for case in figures if case.endswith("Java client")}
    assert all(rate > 0 for rate, _ in figures.values() if rate is not None)
    assert [(bar.required, bar.measured is None) for bar in section.bars] == [
        (1.6, False),
        (4.0, False),
        (1.0, True),
        (1.0, True),
    ]
    assert not section.passed


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
