"""The relay's part of `semel bench bridges`, in small, on the embedded broker."""

from __future__ import annotations

import pytest

from semel.bench import relays
from semel.bench.relay_ways import WAYS
from semel.broker.process import Broker
from semel.testing.postgres import Postgres


def test_both_ways_relay_every_row_and_have_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that loses a row raises. Rates, latencies and costs are there; the bar compares medians."""
    monkeypatch.setattr("semel.bench.relays.EVENTS", 5)
    with Broker(fsync="never") as broker, Postgres(password="bench") as server:
        monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", broker.bootstrap)
        rows, [bar], [note] = relays.measure(server, 300, 1)
    assert len(rows) == 4 * len(WAYS)
    for row in rows:
        _, middle, _, _ = row.figures
        assert middle is not None
        assert middle > 0
    rates = {row.case.rpartition(": ")[2]: row.figures[1] for row in rows if "rows a second" in row.case}
    ours, theirs = rates["semel relay"], rates["by hand, no guarantees"]
    assert ours is not None
    assert theirs is not None
    assert bar.measured == pytest.approx(ours / theirs)
    assert "300 rows" in note
