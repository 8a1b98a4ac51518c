"""Log lines belong to the transaction they were written in, in whatever order programs end their transactions."""

from __future__ import annotations

import gc

import pytest

from semel import logs
from semel.metrics.parts import Part
from semel.metrics.registry import Registry
from semel.observe import Pipeline, Work


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline(Part(Registry(), "session", "Records."), "upper")


def number() -> object:
    return logs.current_fields().get("number")


def begin(pipeline: Pipeline, at: int) -> Work:
    return pipeline.begin(number=at)


def test_a_line_has_the_fields_of_the_innermost_transaction(pipeline: Pipeline) -> None:
    with begin(pipeline, 1):
        with begin(pipeline, 2):
            assert number() == 2
        assert number() == 1
    assert number() is None


def test_transactions_that_end_out_of_turn_leave_nothing_behind(pipeline: Pipeline) -> None:
    """Two producers of one thread, of which the first commits first."""
    first, second = begin(pipeline, 1), begin(pipeline, 2)
    leave_first, leave_second = first.enter(), second.enter()
    first.committed(records=1)
    leave_first()
    assert number() == 2
    second.committed(records=1)
    leave_second()
    assert number() is None


def test_a_transaction_that_was_forgotten_open_leaves_nothing_behind(pipeline: Pipeline) -> None:
    begin(pipeline, 1).enter()
    gc.collect()
    with begin(pipeline, 2):
        assert number() == 2
    assert number() is None


def test_fields_of_the_program_itself_stay(pipeline: Pipeline) -> None:
    with logs.fields(order=7):
        with begin(pipeline, 1):
            assert logs.current_fields()["order"] == 7
        assert logs.current_fields() == {"order": 7}
