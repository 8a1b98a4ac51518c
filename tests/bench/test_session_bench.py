"""`semel bench session`, in small, on the embedded broker."""

from __future__ import annotations

import pytest

from semel.bench.session import run
from semel.broker.process import Broker


def test_all_ways_do_the_same_job_and_have_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row is there, and every rate is one that was measured."""
    with Broker(fsync="never", config={"group.initial.rebalance.delay.ms": "0"}) as broker:
        monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", broker.bootstrap)
        section = run(records=200, rounds=1)
    assert len(section.rows) == 5
    assert all(figure is not None and figure > 0 for row in section.rows for figure in row.figures)
    assert [bar.required for bar in section.bars] == [1.6, 4.0]
