"""Rows that cannot be written, without Spark: which they are, what their dead letters hold, and that good rows pass.

`test_spark_dead_letters.py` has the same in real queries and jobs.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import Blobs, encode, write
from topic_contents import Seen, contents

from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.config import ProducerConfig
from semel.client.producer import Producer
from semel.client.settings import parse_config
from semel.client.topic_rules import TopicRules
from semel.errors import ConfigError, KafkaError, RecordTooLarge, TooManyDeadLetters, UnknownTopic
from semel.records import EncodedBatch, StickyPartitioner, decode_batches
from semel.spark.connections import close_connections
from semel.spark.dead_letters import DeadLetterTerms, check_count, make_terms
from semel.spark.once import check_written
from semel.spark.options import make_options
from semel.spark.row_sorting import Sorter
from semel.wire import ErrorCode

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS),
    ]
)
PARTITIONS = 3
LIMIT = 5_000
_names = count()


def table_of(*rows: Mapping[str, Any], columns: tuple[str, ...] = tuple(SCHEMA.names)) -> pa.Table:
    whole = [{name: row.get(name) for name in SCHEMA.names} for row in rows]
    return pa.Table.from_pylist(whole, schema=SCHEMA).select(list(columns))


def noise(size: int, seed: int = 0) -> bytes:
    """Nothing that could be compressed."""
    return random.Random(seed).randbytes(size)


# -- on a broker -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Broker() as broker:
        with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics("plain", "other", "bad", partitions=PARTITIONS)
            admin.create_topics("narrow", partitions=PARTITIONS, config={"max.message.bytes": str(LIMIT)})
            admin.create_topics("latest", partitions=PARTITIONS, config={"cleanup.policy": "compact"})
        yield broker.bootstrap
        close_connections()


@pytest.fixture
def fresh(bootstrap: str) -> str:
    """A dead-letter topic that nobody else uses."""
    name = f"bad-{next(_names)}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(name, partitions=PARTITIONS)
    return name


def terms_of(bootstrap: str, dead_letter: str, topic: str | None = None, **more: Any) -> DeadLetterTerms:
    options = make_options(
        name="orders",
        bootstrap=bootstrap,
        topic=topic,
        settings=None,
        more_settings={},
        dead_letter=dead_letter,
        **more,
    )
    with Cluster(parse_config(options.settings).client) as cluster:
        made = make_terms(options, cluster, [] if topic is None else [topic], 7, None)
    assert made is not None
    return made


def commit(bootstrap: str, name: str, blobs: Blobs) -> None:
    with Producer(bootstrap_servers=bootstrap, transactional_id=name) as owner:
        owner.begin()
        owner.adopt(check_written(write(bootstrap, owner.share(), blobs), blobs.manifest))
        owner.commit()


def about(seen: Seen) -> dict[str, str]:
    """What the dead letter says of itself."""
    return {
        name.removeprefix("semel.dead-letter."): (value or b"").decode()
        for name, value in seen.headers
        if name.startswith("semel.dead-letter.")
    }


def test_each_kind_of_bad_row_becomes_a_dead_letter_and_the_others_are_written(bootstrap: str, fresh: str) -> None:
    """D8: with its key, value and headers, and with headers that say what is wrong; all in one transaction."""
    header = [{"key": "h", "value": b"1"}]
    bad = [
        ({"topic": None, "key": b"1"}, "Its topic is null."),
        ({"topic": "not-there", "key": b"2"}, "The cluster has no topic 'not-there'."),
        ({"topic": "a b", "key": b"3"}, "'a b' is not a legal name for a topic."),
        ({"topic": "plain", "key": b"4", "partition": 3}, "Partition 3 was asked for and topic 'plain' has 3."),
        ({"topic": "plain", "key": b"5", "partition": -1}, "Partition -1 was asked for and topic 'plain' has 3."),
        ({"topic": "latest"}, "Topic 'latest' is compacted, so each record needs a key, and this one's is null."),
        ({"topic": fresh, "key": b"6"}, "It names the dead-letter topic."),
    ]
    good = [
        {"topic": topic, "key": b"%d" % number, "value": b"good"}
        for number, topic in enumerate(["plain", "other", "latest", "narrow"] * 5)
    ]
    rows = [*good[:9], *({"value": b"v", "headers": header, **row} for row, _ in bad), *good[9:]]
    blobs = encode(bootstrap, None, [table_of(*rows)], 0, dead_letters=terms_of(bootstrap, fresh))
    assert (blobs.manifest.records, blobs.manifest.dead_letters) == (len(rows), len(bad))
    commit(bootstrap, fresh, blobs)
    for topic in ("plain", "other", "latest", "narrow"):
        of_topic = {row["key"] for row in good if row["topic"] == topic}
        assert of_topic <= {seen.key for seen in contents(bootstrap, topic) if seen.value == b"good"}
    seen = {(letter.key, about(letter)["error"]): letter for letter in contents(bootstrap, fresh)}
    assert set(seen) == {(row.get("key"), reason) for row, reason in bad}
    for row, reason in bad:
        letter = seen[row.get("key"), reason]
        told = {"error": reason, "time": "1000", "pipeline": "orders", "batch": "7"}
        if row["topic"] is not None:
            told["output-topic"] = row["topic"]
        if "partition" in row:
            told["output-partition"] = str(row["partition"])
        assert (letter.value, letter.headers[0], about(letter)) == (b"v", ("h", b"1"), told)


def test_a_header_without_a_key_is_kept_under_an_empty_one(bootstrap: str, fresh: str) -> None:
    """D8: Kafka has no headers without keys, so this one cannot be kept as it was."""
    headers = [{"key": "a", "value": b"1"}, {"key": None, "value": b"2"}, None]
    rows = [{"key": b"k", "value": b"v", "headers": headers}, {"key": b"good", "value": b"v"}]
    columns = ("key", "value", "headers")
    terms = terms_of(bootstrap, fresh, "plain")
    commit(bootstrap, fresh, encode(bootstrap, "plain", [table_of(*rows, columns=columns)], 3, dead_letters=terms))
    (letter,) = contents(bootstrap, fresh)
    assert letter.headers[:3] == (("a", b"1"), ("", b"2"), ("", None))
    assert about(letter)["error"] == "It has a header without a key, which Kafka does not allow."


@pytest.mark.parametrize("compression", ["none", "zstd", "gzip", "lz4", "snappy"])
def test_rows_that_a_topic_refuses_for_their_size_are_found_before_they_are_sent(
    bootstrap: str, fresh: str, compression: str
) -> None:
    """D8: `max.message.bytes` counts after compression, and a batch of rows that fit alone must fit too."""
    values = [noise(size, size) for size in (10, 4_000, 4_800, 4_900, 5_000, 6_000, 100, 3_000)]
    values += [b"a" * 20_000, b"b" * 4_990, noise(7_000), b"c"]
    rows = table_of(*({"key": b"k", "value": value} for value in values), columns=("key", "value"))
    topic = f"narrow-{compression}"
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, partitions=PARTITIONS, config={"max.message.bytes": str(LIMIT)})
    terms = terms_of(bootstrap, fresh, topic)
    blobs = encode(
        bootstrap, topic, [rows], 3, dead_letters=terms, batch_size=100_000, **{"compression.type": compression}
    )
    commit(bootstrap, fresh, blobs)
    refused = [value for value in values if not takes(bootstrap, topic, value, compression)]
    assert 0 < len(refused) < len(values)
    letters = contents(bootstrap, fresh)
    assert [letter.value for letter in letters] == refused
    assert all(f"max.message.bytes=5000 of topic '{topic}'" in about(letter)["error"] for letter in letters)
    written = [seen.value for seen in contents(bootstrap, topic)]
    assert written == [value for value in values if value not in refused], "the others keep their order"


def takes(bootstrap: str, topic: str, value: bytes, compression: str) -> bool:
    """Whether the broker takes a record, in a transaction that is aborted."""
    name = f"trial-{next(_names)}"
    with Producer(bootstrap_servers=bootstrap, transactional_id=name, compression_type=compression) as producer:
        producer.begin()
        try:
            producer.send(topic, value, key=b"k")
            producer.flush()
            return True
        except KafkaError as error:
            if error.code != ErrorCode.message_too_large:
                raise
            return False
        finally:
            producer.abort()


def test_a_record_above_the_size_of_a_request_is_cut_in_its_dead_letter(bootstrap: str, fresh: str) -> None:
    """D8: as much of the value as fits, its length, and its SHA-256."""
    value = noise(30_000)
    rows = [{"key": b"k", "value": value}, {"key": b"k", "value": b"good"}]
    terms = terms_of(bootstrap, fresh, "plain")
    table = table_of(*rows, columns=("key", "value"))
    blobs = encode(bootstrap, "plain", [table], 3, dead_letters=terms, **{"max.request.size": 20_000})
    assert blobs.manifest.blob_bytes_max > 19_900, "as much as fits"
    commit(bootstrap, fresh, blobs)
    (letter,) = contents(bootstrap, fresh)
    cut = letter.value or b""
    assert len(cut) > 19_000
    assert value.startswith(cut)
    told = about(letter)
    assert told["error"].endswith("more than max.request.size=20000.")
    assert (told["value-length"], told["value-sha256"]) == ("30000", hashlib.sha256(value).hexdigest())


def test_a_key_or_headers_that_fit_nowhere_are_cut_too(bootstrap: str, fresh: str) -> None:
    """D8: whatever a row holds, it becomes a dead letter that the topic takes."""
    key, value = noise(30_000, 1), noise(30_000, 2)
    headers = [{"key": "h", "value": noise(30_000, 3)}, {"key": "i", "value": None}]
    rows = [
        {"key": key, "value": value, "headers": headers},
        {"key": b"1", "value": value, "headers": headers},
        {"key": b"2", "value": None, "headers": headers},
        {"key": key, "value": b"v"},
    ]
    terms = terms_of(bootstrap, fresh, "plain")
    table = table_of(*rows, columns=("key", "value", "headers"))
    blobs = encode(bootstrap, "plain", [table], 3, dead_letters=terms, **{"max.request.size": 20_000})
    commit(bootstrap, fresh, blobs)
    found = contents(bootstrap, fresh)
    assert len(found) == 4
    for letter in found:
        told = about(letter)
        assert told["pipeline"] == "orders"
        if "headers-dropped" in told:
            assert told["headers-dropped"] == "2"
        if len(letter.key or b"") > 1:
            assert key.startswith(letter.key or b"-")
            assert (told["key-length"], told["key-sha256"]) == ("30000", hashlib.sha256(key).hexdigest())
        else:
            assert "key-length" not in told
    assert [letter.value for letter in found if letter.key == b"2"] == [None], "a tombstone stays one"


def test_too_many_dead_letters_in_one_task_stop_it(bootstrap: str, fresh: str) -> None:
    """D8: the error names count, limit and one example; nothing was sent, since no transaction is open yet."""
    rows = [{"topic": "not-there", "key": b"key-%d" % number, "value": b"v"} for number in range(5)]
    terms = terms_of(bootstrap, fresh, dead_letter_max=4)
    with pytest.raises(TooManyDeadLetters) as caught:
        encode(bootstrap, None, [table_of(*rows)], 0, dead_letters=terms)
    said = str(caught.value)
    assert "At least 5 rows of batch 7 of pipeline 'orders' cannot be written, more than dead_letter_max=4" in said
    assert "a row with key b'key-0' for topic 'not-there': The cluster has no topic 'not-there'." in said
    assert "raise dead_letter_max" in said


def test_too_many_dead_letters_of_several_tasks_stop_the_batch(bootstrap: str, fresh: str) -> None:
    """D8: each task alone is within the limit."""
    parts = [
        table_of(*({"topic": "plain", "partition": 9, "key": b"%d-%d" % (task, row)} for row in range(3)))
        for task in range(2)
    ]
    terms = terms_of(bootstrap, fresh, dead_letter_max=5)
    blobs = encode(bootstrap, None, parts, 0, dead_letters=terms)
    with pytest.raises(TooManyDeadLetters, match=r"^6 rows of batch 7 .*dead_letter_max=5.*key b'0-0'"):
        check_count(blobs.manifest, terms)
    check_count(blobs.manifest, replace(terms, limit=6))


def test_without_a_dead_letter_topic_the_error_names_the_row(bootstrap: str) -> None:
    """D8: the same classes of errors as ever, with the key, the topic and the way out."""
    good = {"topic": "plain", "key": b"good", "value": b"v"}
    cases: list[tuple[type[Exception], dict[str, Any], str]] = [
        (UnknownTopic, {"topic": "not-there", "key": b"k"}, "key b'k' for topic 'not-there'.*no topic 'not-there'"),
        (ConfigError, {"topic": None, "key": b"k"}, "key b'k' for topic null: Its topic is null"),
        (ConfigError, {"topic": "plain", "partition": 7}, "key null for topic 'plain': Partition 7 was asked for"),
        (RecordTooLarge, {"topic": "plain", "key": b"k", "value": noise(9_000)}, "key b'k'.*max.request.size=2000"),
        (ConfigError, {"topic": "plain", "headers": [{"key": None, "value": None}]}, "header without a key"),
    ]
    for kind, row, said in cases:
        with pytest.raises(kind, match=rf"nothing of this micro-batch or job was written.*{said}.*pass dead_letter="):
            encode(bootstrap, None, [table_of(good, row, good)], 0, dead_letters=None, **{"max.request.size": 2_000})


def test_a_dead_letter_topic_that_cannot_take_them_is_refused_at_once(bootstrap: str) -> None:
    """D8: it must be there, be another topic than the output's, keep all records, and have room."""
    with pytest.raises(UnknownTopic, match="Dead letters cannot be written: The cluster has no topic 'nowhere'"):
        terms_of(bootstrap, "nowhere")
    with pytest.raises(ConfigError, match="dead_letter='plain' is the output topic itself"):
        terms_of(bootstrap, "plain", "plain")
    with pytest.raises(ConfigError, match="dead_letter='semel-ledger' is the ledger itself"):
        terms_of(bootstrap, "semel-ledger", "plain")
    with pytest.raises(ConfigError, match="'latest' is compacted"):
        terms_of(bootstrap, "latest", "plain")
    with pytest.raises(ConfigError, match="dead_letter_max=0 allows no dead letter"):
        terms_of(bootstrap, "bad", dead_letter_max=0)
    with pytest.raises(UnknownTopic, match="Rows cannot be written: The cluster has no topic 'nowhere'"):
        terms_of(bootstrap, "bad", "nowhere")
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics("tiny", config={"max.message.bytes": "1000"})
    with pytest.raises(ConfigError, match=r"need room for 4096 bytes, and max.message.bytes of topic 'tiny' \(1000\)"):
        terms_of(bootstrap, "tiny", "plain")


def test_terms_pass_through_a_property_of_a_job(bootstrap: str) -> None:
    """Where a query encodes in its own plan, its tasks get the terms as JSON."""
    terms = terms_of(bootstrap, "bad", "narrow")
    assert DeadLetterTerms.from_json(json.loads(json.dumps(asdict(terms)))) == terms
    assert DeadLetterTerms.from_json(None) is None
    assert terms.rules["narrow"] == TopicRules(PARTITIONS, bytes_max=LIMIT)


# -- against a model, without a broker -------------------------------------------------------------------------------

RULES = {
    "a": TopicRules(2),
    "b": TopicRules(1, bytes_max=700),
    "c": TopicRules(3, needs_key=True),
    "gone": TopicRules(problem="The cluster has no topic 'gone'."),
    "bad": TopicRules(2, bytes_max=9_000),
}
CONFIG = ProducerConfig(batch_bytes=900, request_bytes_max=5_000)

texts = st.none() | st.sampled_from([b"", b"k", b"key-2", b"x" * 600, b"y" * 1_000]) | st.binary(max_size=20)
entries = st.none() | st.fixed_dictionaries(
    {"key": st.sampled_from([None, "", "h", "header"]), "value": st.sampled_from([None, b"", b"1", b"z" * 640])}
)
rows = st.fixed_dictionaries(
    {
        "topic": st.sampled_from([None, "a", "a", "b", "c", "gone", "bad", "no legal name", ""]),
        "partition": st.sampled_from([None, None, None, -1, 0, 1, 2, 3]),
        "key": texts,
        "value": texts | st.sampled_from([b"v" * 4_990, b"w" * 5_200]),
        "headers": st.none() | st.lists(entries, max_size=3),
    }
)


def bytes_alone(row: Mapping[str, Any], compression: str) -> int:
    from semel.records.reference import Record, encode_batch

    headers = tuple((header["key"], header["value"]) for header in row["headers"] or [])
    return len(encode_batch([Record(0, 1_000, row["key"], row["value"], headers)], compression=compression))


def is_bad(row: Mapping[str, Any], compression: str) -> bool:
    """The slow and obvious way to tell."""
    rules = RULES.get(row["topic"] or "")
    if row["topic"] == "bad" or rules is None or rules.problem is not None:
        return True
    if row["partition"] is not None and not 0 <= row["partition"] < rules.partitions:
        return True
    if any(header is None or header["key"] is None for header in row["headers"] or []):
        return True
    if rules.needs_key and row["key"] is None:
        return True
    too_long = bytes_alone(row, "none") > CONFIG.request_bytes_max
    return too_long or bytes_alone(row, compression) > rules.bytes_max


def no_cluster() -> Cluster:
    raise AssertionError("all topics are known")


def sort(table: pa.Table, topic: str | None, compression: str) -> list[tuple[str, int, EncodedBatch]]:
    terms = DeadLetterTerms("bad", 1_000, "orders", None, "job-1", RULES)
    config = replace(CONFIG, compression_type=compression)
    sticky = StickyPartitioner(random.Random(1), batch_bytes=config.batch_bytes)
    return list(Sorter(terms, topic, no_cluster, config, sticky, 1_000, "seed").encode(table))


def read(made: list[tuple[str, int, EncodedBatch]]) -> dict[str, list[dict[str, Any]]]:
    """Records by topic, in the order of their partitions."""
    found: dict[str, list[dict[str, Any]]] = {}
    for topic, partition, batch in sorted(made, key=lambda item: item[:2]):
        for record in decode_batches(bytes(batch.data)).to_pylist():
            found.setdefault(topic, []).append({"partition": partition, **record})
    return found


def in_pieces(table: pa.Table, at: int, text: pa.DataType) -> pa.Table:
    """The same rows as Spark may hand them over: in several pieces, with long or short strings."""
    fields = [field.with_type(text) if field.name == "topic" else field for field in table.schema]
    cut = pa.concat_tables([table.slice(0, at), table.slice(at)])
    return cut.cast(pa.schema(fields))


def content(row: dict[str, Any]) -> tuple[Any, list[tuple[Any, Any]]]:
    """Value and headers, whichever order the fields of a header are in."""
    return row["value"], [(header["key"], header["value"]) for header in row["headers"] or []]


@settings(deadline=None)
@given(
    given_rows=st.lists(rows, min_size=1, max_size=40),
    topic_of_all=st.sampled_from([None, None, "a", "b", "c"]),
    compression=st.sampled_from(["none", "lz4", "zstd"]),
    at=st.integers(0, 40),
    text=st.sampled_from([pa.string(), pa.large_string()]),
)
def test_rows_are_sorted_as_the_obvious_model_sorts_them(
    given_rows: list[dict[str, Any]], topic_of_all: str | None, compression: str, at: int, text: pa.DataType
) -> None:
    """D8: every row is written once, at its place or as a dead letter; keys keep their order; a repeat is the same."""
    table = in_pieces(table_of(*given_rows), at, text)
    if topic_of_all is not None:
        table = table.drop_columns("topic")
        given_rows = [{**row, "topic": topic_of_all} for row in given_rows]
    made, again = sort(table, topic_of_all, compression), sort(table, topic_of_all, compression)
    assert [bytes(batch.data) for *_, batch in made] == [bytes(batch.data) for *_, batch in again]
    for topic, _, batch in made:
        assert len(batch.data) <= RULES[topic].bytes_max, "the broker would refuse it"
    found = read(made)
    for topic in ("a", "b", "c"):
        wanted = [row for row in given_rows if row["topic"] == topic and not is_bad(row, compression)]
        written = found.get(topic, [])
        for key in {row["key"] for row in [*wanted, *written]}:
            values = [content(row) for row in wanted if row["key"] == key]
            seen = [content(row) for row in written if row["key"] == key]
            in_order = key is not None and all(row["partition"] is None for row in wanted)
            assert seen == values if in_order else sorted(map(repr, seen)) == sorted(map(repr, values))
        asked = [(row["partition"], row["value"]) for row in wanted if row["partition"] is not None]
        assert not {(row["partition"], row["value"]) for row in written} ^ set(asked) or len(asked) < len(wanted)
    letters = [row for row in given_rows if is_bad(row, compression)]
    values = {hashlib.sha256(row["value"]).hexdigest(): row["value"] for row in given_rows if row["value"]}
    seen_letters = [of_letter(record, values) for record in found.get("bad", [])]
    assert sorted(map(repr, seen_letters)) == sorted(map(repr, map(of_row, letters)))


def of_row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    headers = [header or {"key": "", "value": None} for header in row["headers"] or []]
    return row["key"], row["value"], [(header["key"] or "", header["value"]) for header in headers], row["topic"]


def of_letter(record: Mapping[str, Any], values: Mapping[str, bytes]) -> tuple[Any, ...]:
    """The same of a dead letter; a value that was cut is found by its digest among those of the rows."""
    headers = [(header["key"], header["value"]) for header in record["headers"]]
    ours = {name: value.decode() for name, value in headers if name.startswith("semel.")}
    assert ours.keys() >= {"semel.dead-letter.error", "semel.dead-letter.pipeline", "semel.dead-letter.job"}
    kept = [header for header in headers if not header[0].startswith("semel.")]
    value = record["value"]
    if "semel.dead-letter.value-length" in ours:
        whole = values[ours["semel.dead-letter.value-sha256"]]
        assert whole.startswith(value)
        assert len(value) < len(whole) == int(ours["semel.dead-letter.value-length"])
        value = whole
    return record["key"], value, kept, ours.get("semel.dead-letter.output-topic")
