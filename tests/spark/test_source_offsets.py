"""Offsets of the Spark source: their JSON, and limits and splits against slow and obvious models."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.client.partitions import TopicPartition
from semel.errors import ConfigError
from semel.spark.input_offsets import merge_ends, parse_ends
from semel.spark.source_offsets import (
    Note,
    OffsetRange,
    limit_offsets,
    parse_numbers,
    split_note,
    split_ranges,
    to_checkpoint,
)

partitions = st.builds(TopicPartition, st.sampled_from(["a", "b", "ä"]), st.integers(0, 12))
offsets = st.integers(0, 2**62)
sizes = st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 2**40))


@st.composite
def spans(draw: st.DrawFn) -> dict[TopicPartition, tuple[int, int]]:
    """Start and end of a few partitions, some of them empty, one perhaps running backwards."""
    named = draw(st.lists(partitions, unique=True, max_size=8))
    found = {}
    for partition in named:
        start = draw(offsets)
        found[partition] = (start, start + draw(sizes))
    if found and draw(st.booleans()):
        found[named[0]] = (found[named[0]][0], max(0, found[named[0]][0] - draw(st.integers(1, 5))))
    return found


notes = st.builds(
    Note,
    st.none() | st.text(max_size=5),
    st.dictionaries(partitions, offsets),
    st.dictionaries(st.sampled_from(["a", "b", "ä"]), st.uuids().map(str)),
)


@given(st.dictionaries(partitions, offsets), st.none() | notes)
def test_offsets_survive_their_way_through_the_checkpoint_as_one_text(
    given_: dict[TopicPartition, int], note: Note | None
) -> None:
    """Spark compares offsets as text: the same offsets must always be the same text, whatever order they came in."""
    text = json.dumps(to_checkpoint(given_, note))
    assert split_note(json.loads(text)) == (given_, note)
    turned = note and Note(note.cluster, dict(reversed(note.start.items())), dict(reversed([*note.topic_ids.items()])))
    assert json.dumps(to_checkpoint(dict(reversed(given_.items())), turned)) == text


@given(st.dictionaries(partitions, offsets), notes)
def test_other_readers_of_the_checkpoint_find_no_offset_in_the_note(
    given_: dict[TopicPartition, int], note: Note
) -> None:
    """Spark's Kafka source reads a map of maps; the sink reads it for the consumer group."""
    text = json.dumps(to_checkpoint(given_, note))
    kafka = {
        TopicPartition(topic, int(partition)): offset
        for topic, partitions_ in json.loads(text).items()
        for partition, offset in partitions_.items()
    }
    assert kafka == given_
    ends = parse_ends(f"v1\n{{}}\n{text}")
    assert ends == parse_ends(f"v2\n{{}}\n0:{text}")
    assert merge_ends(ends) == given_
    assert "\n" not in text


@pytest.mark.parametrize("note", ["", "{", "[]", '{"cluster":"c"}', '{"cluster":"c","start":{"a":5},"topic_ids":{}}'])
def test_a_note_that_cannot_be_read_is_refused(note: str) -> None:
    """Offsets of the first micro-batch that are guessed would lose or repeat records."""
    with pytest.raises(ConfigError, match=r"nothing was read\. Restore the file"):
        split_note({"a": {"0": 5}, f"semel:{note}": {}})


def test_fields_of_a_later_version_of_the_note_are_passed_over() -> None:
    """So that a query can go back to this version."""
    name = 'semel:{"cluster":"c","start":{"a":{"0":1}},"topic_ids":{},"later":[1]}'
    assert split_note({name: {}}) == ({}, Note("c", {TopicPartition("a", 0): 1}, {}))


def test_a_checkpoint_of_sparks_kafka_source_is_understood_and_its_like_is_written() -> None:
    """The format is that of Spark's Kafka source, down to the order of partition 10 after 9."""
    text = '{"orders":{"0":5,"9":1,"10":7}}'
    read, note = split_note(json.loads(text))
    assert note is None
    assert read[TopicPartition("orders", 10)] == 7
    assert json.dumps(to_checkpoint(read), separators=(",", ":")) == text
    assert parse_numbers("startingOffsets", text, -2, "") == read


@given(spans(), st.integers(1, 2**40))
def test_a_limited_batch_takes_of_each_partition_its_share(
    span: dict[TopicPartition, tuple[int, int]], limit: int
) -> None:
    """By the rule of Spark's Kafka source in exact fractions: rounded down, yet one at least; never past the end."""
    start = {partition: begin for partition, (begin, _) in span.items()}
    end = {partition: until for partition, (_, until) in span.items()}
    total = sum(max(0, until - begin) for begin, until in span.values())
    expected = {}
    for partition, (begin, until) in span.items():
        if until <= begin or total <= limit:
            expected[partition] = until
            continue
        share = Fraction(limit * (until - begin), total)
        step = math.ceil(share) if share < 1 else math.floor(share)
        expected[partition] = min(until, begin + step)
    assert limit_offsets(start, end, limit) == expected


@given(st.lists(sizes.filter(bool), min_size=1, max_size=6), st.integers(1, 50))
def test_limited_batches_come_to_the_end_and_none_is_much_over_the_limit(lengths: list[int], limit: int) -> None:
    """Every batch makes progress on every partition that has something; the limit is passed by one a partition."""
    end = {TopicPartition("t", number): min(length, 500) for number, length in enumerate(lengths)}
    at = dict.fromkeys(end, 0)
    for _ in range(2000):
        after = limit_offsets(at, end, limit)
        assert all(after[partition] > at[partition] for partition in end if at[partition] < end[partition])
        assert sum(after.values()) - sum(at.values()) <= limit + len(end)
        at = after
        if at == end:
            break
    assert at == end


def model_part_count(size: int, total: int, count: int) -> int:
    return max(1, math.floor(Fraction(size * count, total) + Fraction(1, 2)))


@given(spans(), st.none() | st.integers(1, 40), st.none() | st.integers(1, 2**38))
def test_tasks_together_read_every_offset_once(
    span: dict[TopicPartition, tuple[int, int]], min_partitions: int | None, max_records: int | None
) -> None:
    """Whatever the options, the pieces of a partition join up from its start to its end, and none is empty."""
    if max_records is not None:
        max_records = max(max_records, max((end - start for start, end in span.values()), default=1) // 1000 + 1)
    ranges = [OffsetRange(*partition, start, end) for partition, (start, end) in span.items()]
    pieces = split_ranges(ranges, min_partitions, max_records)
    for whole in ranges:
        own = [piece for piece in pieces if (piece.topic, piece.partition) == (whole.topic, whole.partition)]
        if whole.size <= 0:
            assert own == []
            continue
        assert [own[0].start, *(piece.end for piece in own)] == [*(piece.start for piece in own), whole.end]
        assert own[0].start == whole.start
        assert all(piece.size > 0 for piece in own)
        if max_records is not None:
            assert all(piece.size <= max_records for piece in own)


@given(spans(), st.integers(1, 40))
def test_a_partition_is_cut_into_as_many_pieces_as_its_share_of_min_partitions(
    span: dict[TopicPartition, tuple[int, int]], min_partitions: int
) -> None:
    """By the rule of Spark's Kafka source: what stays whole is left out of the reckoning for the others."""
    lengths = {partition: end - start for partition, (start, end) in span.items() if end > start}
    ranges = [OffsetRange(*partition, start, end) for partition, (start, end) in span.items()]
    pieces = split_ranges(ranges, min_partitions)
    counted = dict.fromkeys(lengths, 0)
    for piece in pieces:
        counted[TopicPartition(piece.topic, piece.partition)] += 1
    if len(lengths) >= min_partitions:
        assert set(counted.values()) <= {1}
        return
    total = sum(lengths.values())
    small = {p for p, length in lengths.items() if model_part_count(length, total, min_partitions) == 1}
    rest = sum(length for p, length in lengths.items() if p not in small)
    for partition, length in lengths.items():
        wanted = 1 if partition in small else model_part_count(length, rest, max(1, min_partitions - len(small)))
        assert counted[partition] == min(wanted, length)
        own = [p.size for p in pieces if (p.topic, p.partition) == partition]
        assert max(own) - min(own) <= 1
