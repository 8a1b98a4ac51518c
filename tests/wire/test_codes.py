"""The table of error codes."""

from __future__ import annotations

import pytest

from semel.wire import Action, Api, ErrorCode, Refresh, verdict
from semel.wire.codes import OVERRIDES, TABLE


@pytest.mark.parametrize("row", [*TABLE.values(), *OVERRIDES.values()], ids=lambda row: row.reason[:40])
def test_every_row_has_a_reason_and_only_retries_refresh(row) -> None:
    """A row without a reason cannot be judged by the next reader."""
    assert len(row.reason) > 10
    assert row.action is Action.RETRIABLE or (row.refresh is Refresh.NOTHING and not row.soon)


def test_what_kafka_calls_retriable_is_never_fatal_here() -> None:
    """kio carries Kafka's own mark; a retriable code that the table has must not end the producer."""
    wrong = [code.name for code in TABLE if code.retriable and TABLE[code].action is Action.FATAL]
    assert wrong == []


def test_an_old_epoch_is_fatal_at_the_coordinator_and_abortable_at_a_leader() -> None:
    """A leader cannot tell a time-out from a new owner; the coordinator can."""
    assert verdict(ErrorCode.invalid_producer_epoch, Api.PRODUCE).action is Action.ABORTABLE
    assert verdict(ErrorCode.invalid_producer_epoch, Api.END_TXN).action is Action.FATAL


def test_markers_still_being_written_are_waited_for_in_milliseconds() -> None:
    """Otherwise every back-to-back transaction would wait a whole back-off."""
    for code in (ErrorCode.concurrent_transactions, ErrorCode.not_enough_replicas):
        assert verdict(code, Api.PRODUCE).soon


def test_an_unlisted_code_stops_rather_than_loops() -> None:
    """A code nobody thought of must surface."""
    assert verdict(ErrorCode.duplicate_voter, Api.PRODUCE).action is Action.FATAL
