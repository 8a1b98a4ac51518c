"""What a run's history says about each of its seconds."""

from __future__ import annotations

import numpy as np
import pytest

from semel.verify.history import Act, History, Manifest, Phase, Rows, make_rows
from semel.verify.timeline import timeline_of

SECOND_NS = 1_000_000_000
START_NS = 77 * SECOND_NS + 123


def row(act: Act, phase: Phase, at_s: float, **columns: int) -> Rows:
    return make_rows(1, act, phase, time_ns=START_NS + int(at_s * SECOND_NS), process=0, **columns)


def history_of(*parts: Rows) -> History:
    return History(Manifest([("t", 0), ("t", 1)]), list(parts))


def test_every_second_counts_what_ended_in_it() -> None:
    """Commits by their ends, also where the beginning is in another part; sends by their beginnings."""
    timeline = timeline_of(
        history_of(
            row(Act.SEND, Phase.INVOKE, 0),
            row(Act.SEND, Phase.INVOKE, 0.5),
            row(Act.COMMIT, Phase.INVOKE, 0.9, transaction=0),
            row(Act.COMMIT, Phase.OK, 1.1, transaction=0),
            row(Act.COMMIT, Phase.INVOKE, 1.2, transaction=1),
            row(Act.COMMIT, Phase.FAIL, 1.3, transaction=1),
            row(Act.ABORT, Phase.OK, 2.0, transaction=2),
            row(Act.COMMIT, Phase.INVOKE, 2.5, transaction=3),
            row(Act.COMMIT, Phase.UNKNOWN, 3.5, transaction=3),
            row(Act.READ, Phase.OK, 3.9),
        )
    )
    assert timeline.seconds == 4
    assert timeline.sent.tolist() == [2, 0, 0, 0]
    assert timeline.committed.tolist() == [0, 1, 0, 0]
    assert timeline.aborted.tolist() == [0, 1, 1, 0]
    assert timeline.unknown.tolist() == [0, 0, 0, 1]
    assert timeline.read.tolist() == [0, 0, 0, 1]
    assert timeline.commit_p99_ms[1] == pytest.approx(200)
    assert np.isnan(timeline.commit_p99_ms[[0, 2, 3]]).all()
    assert timeline.totals == {"sent": 2, "committed": 1, "aborted": 2, "unknown": 1, "read": 1}
    assert timeline.at_second(START_NS + 2 * SECOND_NS) == 2.0


def test_what_readers_cannot_have_yet_is_added_over_the_partitions() -> None:
    """Each partition counts with what was last seen of it."""
    timeline = timeline_of(
        history_of(
            row(Act.ENDS, Phase.OK, 0, partition=0, offset=5, value=9),
            row(Act.ENDS, Phase.OK, 0.1, partition=1, offset=0, value=1),
            row(Act.ENDS, Phase.OK, 1.0, partition=0, offset=9, value=9),
        )
    )
    assert timeline.unstable_records.tolist() == [5.0, 1.0]


def test_an_empty_history_has_one_empty_second() -> None:
    """Nobody did anything; nothing is divided by nothing."""
    timeline = timeline_of(history_of())
    assert timeline.seconds == 1
    assert set(timeline.totals.values()) == {0}
