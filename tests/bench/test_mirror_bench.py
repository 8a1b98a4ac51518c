"""`semel bench mirror`, in small, on embedded brokers; MirrorMaker 2 itself runs only by hand."""

from __future__ import annotations

import pytest

from semel.bench import mirror
from semel.bench.mirrors import semel_mirror
from semel.broker.process import Broker


def test_both_mirrors_have_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate and delays for each, and the report says how the peer was tuned."""
    monkeypatch.setattr(mirror, "MIRRORS", {"semel mirror": semel_mirror, "MirrorMaker 2": semel_mirror})
    with Broker(fsync="never") as source, Broker(fsync="never") as target:
        monkeypatch.setenv("SEMEL_BENCH_SOURCE", source.bootstrap)
        monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", target.bootstrap)
        section = mirror.run(records=20_000, rounds=1, singles=5)
    for row in section.rows:
        best, middle, p50, p99 = row.figures
        assert best == middle
        assert best is not None
        assert best > 0
        assert p50 is not None
        assert p99 is not None
        assert 0 < p50 <= p99
    assert all(bar.measured for bar in section.bars)
    assert "tasks.max=2" in section.notes[1]
