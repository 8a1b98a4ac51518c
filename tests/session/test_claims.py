"""What the group's thread may do to an open transaction, and when a transaction may still be committed."""

from __future__ import annotations

import logging

import pytest

from semel.client.partitions import TopicPartition
from semel.session.claims import MARKER_PAUSE_S, Claims, Safety

ONE, TWO = TopicPartition("t", 1), TopicPartition("t", 2)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def claims_of(clock: Clock, safety: Safety | None = None) -> Claims:
    claims = Claims(clock, 10_000, safety or Safety())
    claims.begin({ONE: 7})
    return claims


def test_releasing_a_partition_dooms_only_the_transaction_that_has_its_records() -> None:
    """D2: another partition can go without disturbing it."""
    claims = claims_of(Clock())
    assert claims.may_release(frozenset([TWO]))
    assert claims.doomed is None
    assert claims.may_release(frozenset([ONE, TWO]))
    assert "took t-1 away" in str(claims.doomed)
    claims.begin({TWO: 8})
    assert claims.doomed is None


def test_nothing_is_released_during_a_commit_and_what_is_lost_all_the_same_dooms_it() -> None:
    """D3: the release waits for the end; a loss cannot be refused."""
    claims = claims_of(Clock())
    claims.start_commit()
    assert not claims.may_release(frozenset([ONE]))
    assert claims.doomed is None
    claims.lost(frozenset([ONE]))
    assert claims.doomed is not None
    claims.end(committed=False)
    assert claims.may_release(frozenset([ONE]))


@pytest.mark.parametrize(("tenures", "is_doomed"), [({ONE: 7}, False), ({ONE: 8}, True), ({TWO: 7}, True)])
def test_a_partition_that_went_and_came_back_is_not_the_same(
    tenures: dict[TopicPartition, int], is_doomed: bool
) -> None:
    """D2: another may have processed the records in between."""
    claims = claims_of(Clock())
    claims.start_commit()
    claims.check_tenures(tenures)
    assert (claims.doomed is not None) is is_doomed


def test_the_pause_for_markers_follows_commits_only_and_only_where_it_is_needed() -> None:
    """D4: 200 ms, and none after an abort."""
    clock = Clock()
    claims = claims_of(clock, Safety(stable_fetches=False))
    claims.end(committed=False)
    assert claims.may_release(frozenset([ONE]))
    claims.begin({ONE: 7})
    claims.end(committed=True)
    assert not claims.may_release(frozenset([ONE]))
    clock.now += MARKER_PAUSE_S
    assert claims.may_release(frozenset([ONE]))


def test_a_long_transaction_is_warned_of_once_and_only_if_something_was_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """H4: its age counts from the first write; whoever only reads and computes holds nobody up."""
    clock = Clock()
    claims = claims_of(clock)
    caplog.set_level(logging.WARNING)
    claims.tick(clock.now + 9)
    claims.note_write("questions")
    claims.tick(clock.now + 4.9)
    assert not caplog.records
    claims.tick(clock.now + 5.5)
    claims.tick(clock.now + 6)
    [warning] = caplog.records
    assert "open for 5.5 s and will be aborted at 10.0 s" in warning.getMessage()
    assert "written to questions" in warning.getMessage()
    claims.begin({ONE: 7})
    claims.note_write("questions")
    claims.start_commit()
    claims.tick(clock.now + 9)
    assert len(caplog.records) == 1
