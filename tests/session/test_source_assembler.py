"""Which source transactions are whole: the assembler against a slow and obvious model, in random interleavings."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.client.partitions import TopicPartition
from semel.client.source_transactions import TransactionEnd
from semel.errors import TransactionIncomplete
from semel.records.schema import RECORD_SCHEMA
from semel.session.source_assembler import Assembler, EventRun
from semel.session.source_headers import events_of

ENDS = TopicPartition("shop.transactions", 0)
PLACES = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0), TopicPartition("c", 0)]
Event = tuple[int, int, int]
"""Offset, transaction, index."""


@dataclass
class Source:
    """What a relay has written: logs with gaps, as markers and aborted records leave them."""

    first: int
    logs: dict[TopicPartition, list[Event]]
    ends: list[tuple[int, TransactionEnd]]
    ends_at: dict[TopicPartition, int] = field(default_factory=dict[TopicPartition, int])

    @property
    def last(self) -> int:
        return self.first + len(self.ends) - 1

    def events_of(self, transaction: int, topics: set[str]) -> set[tuple[TopicPartition, Event]]:
        return {(p, e) for p, log in self.logs.items() if p.topic in topics for e in log if e[1] == transaction}


def make_source(seed: random.Random, transactions: int) -> Source:
    first = seed.choice([0, 1])
    logs: dict[TopicPartition, list[Event]] = {place: [] for place in PLACES}
    at = dict.fromkeys([*PLACES, ENDS], 0)
    ends: list[tuple[int, TransactionEnd]] = []
    for number in range(first, first + transactions):
        counts: Counter[str] = Counter()
        for index in range(seed.choice([0, 1, 1, 2, 3, 8])):
            place = seed.choice(PLACES)
            at[place] += seed.choice([0, 0, 0, 1, 3])
            logs[place].append((at[place], number, index))
            at[place] += 1
            counts[place.topic] += 1
        at[ENDS] += seed.choice([0, 0, 2])
        ends.append((at[ENDS], TransactionEnd("shop", number, counts)))
        at[ENDS] += 1
    return Source(first, logs, ends, at)


class Reader:
    """Reads a source piece by piece into an assembler, and holds what the assembler does not: the events."""

    def __init__(self, source: Source, topics: set[str], positions: dict[TopicPartition, int], applied: int | None):
        self.source = source
        self.at = {place: positions.get(place, 0) for place in [*PLACES, ENDS] if place.topic in topics | {ENDS.topic}}
        self.topics = topics
        self.held: dict[TopicPartition, list[Event]] = {place: [] for place in self.at if place != ENDS}
        self.ends: list[tuple[int, TransactionEnd]] = []
        self.applied = applied
        self.assembler = Assembler("shop", topics, applied=applied)
        for place in self.held:
            self.assembler.add_partition(place, self.at[place])
        self.assembler.begin_ends(ENDS, self.at[ENDS])

    def read(self, place: TopicPartition, seed: random.Random) -> None:
        until = min(self.source.ends_at[place], self.at[place] + seed.choice([1, 2, 5, 50]))
        if place == ENDS:
            new = [end for end in self.source.ends if self.at[place] <= end[0] < until]
            self.ends += new
            self.assembler.add_ends(new, until)
        else:
            events = [event for event in self.source.logs[place] if self.at[place] <= event[0] < until]
            self.held[place] += [event for event in events if self.applied is None or event[1] > self.applied]
            self.assembler.add_events(place, runs_of(events), until)
        self.at[place] = until

    # -- the model: everything is counted from the beginning each time ----------------------------------------------

    def is_whole(self, number: int) -> bool:
        end = next((end for _, end in self.ends if end.transaction == number), None)
        if end is None:
            return False
        seen = Counter(place.topic for place, events in self.held.items() for event in events if event[1] == number)
        return all(seen[topic] == end.topics.get(topic, 0) for topic in self.topics)

    def model_positions(self) -> dict[TopicPartition, int]:
        found = {place: min([e[0] for e in events], default=self.at[place]) for place, events in self.held.items()}
        left = [at for at, end in self.ends if self.applied is None or end.transaction > self.applied]
        return found | {ENDS: min(left, default=self.at[ENDS])}

    def take(self, events_max: int) -> list[int]:
        """What the assembler gives, checked: whole, in order, as many as allowed, and the positions are the model's."""
        taken = self.assembler.take(events_max)
        expected = (self.source.first if self.applied is None else self.applied + 1) if self.ends else 0
        if taken is None:
            assert not self.ends or not self.is_whole(expected)
            return []
        numbers = [end.transaction for end in taken.ends]
        assert numbers == list(range(expected, expected + len(numbers)))
        assert all(self.is_whole(number) for number in numbers)
        events = {
            (place, event) for place, held in self.held.items() for event in held if event[0] < taken.positions[place]
        }
        wanted = set[Any]().union(*(self.source.events_of(number, self.topics) for number in numbers))
        assert events == wanted
        assert taken.events == len(events)
        assert taken.events <= events_max or len(numbers) == 1
        self.applied = taken.last
        for place, held in self.held.items():
            self.held[place] = [event for event in held if event[1] > taken.last]
        assert taken.positions == self.model_positions()
        return numbers


def runs_of(events: list[Event]) -> list[EventRun]:
    return [EventRun(number, offset, 1, index, index) for offset, number, index in events]


@given(st.integers(0, 2**32), st.sampled_from([{"a"}, {"a", "b"}, {"a", "b", "c"}]))
@settings(max_examples=300, deadline=None)
def test_it_agrees_with_the_model_through_restarts(number: int, topics: set[str]) -> None:
    """H1: each transaction is given out once, whole, in commit order; a restart goes on from positions and number."""
    seed = random.Random(number)
    source = make_source(seed, seed.choice([1, 5, 30]))
    reader = Reader(source, topics, {}, None)
    positions: dict[TopicPartition, int] = {}
    given_out: list[int] = []
    while len(given_out) < len(source.ends):
        step = seed.random()
        if step < 0.05:  # killed: the database has the positions and the number of the last commit
            reader = Reader(source, topics, positions, given_out[-1] if given_out else None)
        elif step < 0.4:
            numbers = reader.take(seed.choice([1, 3, 1000]))
            given_out += numbers
            if numbers:
                positions = reader.assembler.positions
        else:
            reader.read(seed.choice(list(reader.at)), seed)
    assert given_out == list(range(source.first, source.last + 1))


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_reading_only_what_is_wanted_always_gets_there(number: int) -> None:
    """With no room to read ahead, the next transaction is still found: no partition that it needs is held back."""
    seed = random.Random(number)
    source = make_source(seed, 20)
    reader = Reader(source, {"a", "b", "c"}, {}, None)
    given_out: list[int] = []
    while len(given_out) < len(source.ends):
        given_out += reader.take(1)
        behind = [place for place in reader.assembler.wanted() if reader.at[place] < source.ends_at[place]]
        if not reader.assembler.has_whole and len(given_out) < len(source.ends):
            assert behind, "nothing is wanted, and the next transaction is not whole"
            reader.read(seed.choice(sorted(behind)), seed)
    assert given_out == list(range(source.first, source.last + 1))


@given(st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_a_lost_event_is_known_to_be_lost_and_no_other(number: int) -> None:
    """It can never come when every partition of its topic is read beyond where it can be; before that it may."""
    seed = random.Random(number)
    source = make_source(seed, 20)
    places = [place for place, log in source.logs.items() if log]
    if not places:
        return
    place = seed.choice(places)
    lost = source.logs[place].pop(seed.randrange(len(source.logs[place])))
    reader = Reader(source, {"a", "b", "c"}, {}, None)
    given_out: list[int] = []
    while any(reader.at[one] < source.ends_at[one] for one in reader.at):
        given_out += reader.take(1)
        reader.read(seed.choice(list(reader.at)), seed)
        lacking = reader.assembler.lacking()
        if lacking is not None and lacking[1] and lacking[0].transaction != lost[1]:
            assert not all(reader.assembler.has_passed(topic, source.ends_at) for topic in lacking[1])
    while numbers := reader.take(1):
        given_out += numbers
    assert given_out == list(range(source.first, lost[1]))
    end, lacks = reader.assembler.lacking() or (None, {})
    assert (end and end.transaction, lacks) == (lost[1], {place.topic: 1})
    assert reader.assembler.has_passed(place.topic, source.ends_at)


def end(number: int, **topics: int) -> TransactionEnd:
    return TransactionEnd("shop", number, topics)


def assembler(applied: int | None = None) -> Assembler:
    made = Assembler("shop", ["a"], applied=applied)
    made.add_partition(PLACES[0], 0)
    made.begin_ends(ENDS, 0)
    return made


WRONG: list[tuple[str, int | None, list[tuple[int, TransactionEnd]], list[Event], str]] = [
    ("gap", None, [(0, end(1)), (1, end(3))], [], "goes on with 3"),
    ("gap after a restart", 7, [(0, end(9))], [], "goes on with 9"),
    ("numbers begin again", 7, [(0, end(1))], [], "has begun to count from the start"),
    ("the first ones were deleted", None, [(0, end(5))], [], "pass after="),
    ("a snapshot without its end", None, [(0, end(1))], [(0, 0, 0)], "snapshot"),
    ("more events than said", None, [(0, end(1, a=1))], [(0, 1, 0), (1, 1, 1)], "more events"),
    ("an event of an empty one", None, [(0, end(1))], [(0, 1, 0)], "applied|more events"),
    ("the same event twice", None, [], [(0, 4, 0), (1, 4, 0)], "commit order"),
    ("an earlier transaction", None, [], [(0, 4, 0), (1, 3, 0)], "commit order"),
]


@pytest.mark.parametrize(("applied", "ends", "events", "text"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_cannot_be_put_right_is_one_error(
    applied: int | None, ends: list[tuple[int, TransactionEnd]], events: list[Event], text: str
) -> None:
    """H1: a stream that is broken never passes for a whole one."""
    made = assembler(applied)

    def read() -> None:
        made.add_events(PLACES[0], runs_of(events), 10)
        made.add_ends(ends, 10)

    with pytest.raises(TransactionIncomplete, match=text):
        read()


def test_an_event_that_comes_after_its_transaction_was_applied_is_an_error() -> None:
    made = assembler()
    made.add_ends([(0, end(1, a=0))], 1)
    assert made.take(10) is not None
    with pytest.raises(TransactionIncomplete, match="whole without it"):
        made.add_events(PLACES[0], runs_of([(0, 1, 0)]), 1)


def test_events_before_the_start_are_passed_over() -> None:
    """`after=` and a topic that is read again from its beginning bring events that are applied already."""
    made = assembler(applied=6)
    made.add_events(PLACES[0], runs_of([(0, 5, 0), (1, 6, 0), (2, 7, 0)]), 3)
    made.begin_ends(ENDS, 0, has_applied=True)
    made.add_ends([(0, end(5)), (1, end(6)), (2, end(7, a=1)), (3, TransactionEnd("other", 1, {"a": 4}))], 4)
    taken = made.take(10)
    assert taken is not None
    assert (taken.first, taken.last, taken.events) == (7, 7, 1)
    assert made.positions == {PLACES[0]: 3, ENDS: 4}
    with pytest.raises(TransactionIncomplete, match="count"):
        made.add_ends([(4, end(5))], 5)


# -- headers ---------------------------------------------------------------------------------------------------------


def records(*headers: list[tuple[str, bytes | None]] | None) -> pa.Table:
    count = len(headers)
    columns = {
        "offset": list(range(count)),
        "timestamp": [0] * count,
        "timestamp_type": [0] * count,
        "key": [None] * count,
        "value": [b"v"] * count,
        "headers": [one and [{"key": key, "value": value} for key, value in one] for one in headers],
    }
    return pa.table(columns, schema=RECORD_SCHEMA)


def of(source: str, transaction: object, index: object) -> list[tuple[str, bytes | None]]:
    return [
        ("semel.source", source.encode()),
        ("semel.source.transaction", str(transaction).encode()),
        ("semel.source.index", str(index).encode()),
    ]


def test_headers_become_runs_and_others_are_left_out() -> None:
    """Records of other sources, and of none, belong to no transaction of this one."""
    table = records(
        of("shop", 1, 0), None, [("x", None)], of("other", 1, 1), [("semel.source", b"old"), *of("shop", 1, 2)],
        of("shop", 1, 3), of("shop", 2, 0), [("semel.source", None)],
    )  # fmt: skip
    events = events_of(pa.concat_tables([table.slice(0, 3), table.slice(3)]), "shop", "a-0")
    assert events.offsets.tolist() == [0, 4, 5, 6]
    assert events.table["offset"].to_pylist() == [0, 4, 5, 6]
    assert events.runs() == [EventRun(1, 0, 3, 0, 3), EventRun(2, 6, 1, 0, 0)]
    nothing = events_of(records(), "shop", "a-0")
    assert (nothing.table.num_rows, nothing.runs()) == (0, [])


@pytest.mark.parametrize("headers", [of("shop", "x", 0), of("shop", 1, 0)[:2], of("shop", 1, "")])
def test_a_record_with_half_of_the_headers_is_an_error(headers: Any) -> None:
    with pytest.raises(TransactionIncomplete, match="a-0"):
        events_of(records(of("shop", 1, 0), headers), "shop", "a-0")


def test_runs_are_cut_where_the_order_is_wrong() -> None:
    """So that the assembler sees it, though both events are of one transaction."""
    events = events_of(records(of("shop", 1, 1), of("shop", 1, 1), of("shop", 1, 5)), "shop", "a-0")
    assert [run.events for run in events.runs()] == [1, 2]
    assert np.array_equal(events.transactions, [1, 1, 1])
