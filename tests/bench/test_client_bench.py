"""`semel bench client`, in small, on the embedded broker."""

from __future__ import annotations

import pytest

from semel.bench.client import run
from semel.broker.process import Broker


def test_both_clients_write_and_read_every_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench itself counts what was read; the report names the settings of the other client."""
    with Broker(fsync="never") as broker:
        monkeypatch.setenv("SEMEL_BENCH_BOOTSTRAP", broker.bootstrap)
        section = run(records=2_000, rounds=1)
    assert [row.case for row in section.rows] == ["produce in transactions", "read committed"]
    assert all(figure is not None and figure > 0 for row in section.rows for figure in row.figures)
    assert any("fetch.queue.backoff.ms=5" in note for note in section.notes)
