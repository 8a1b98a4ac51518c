"""The options of `format("semel")` for writing: what they become, and what is refused."""

from __future__ import annotations

import pytest

from semel.errors import ConfigError
from semel.spark.format_options import parse_job_options, parse_stream_options

STREAM = {"name": "orders", "topic": "out", "kafka.bootstrap.servers": "h:1", "checkpointLocation": "/data/orders"}
JOB = {"name": "orders", "topic": "out", "kafka.bootstrap.servers": "h:1", "job.id": "2026-11-15"}


def test_options_are_those_of_the_sink_in_any_case_and_spelling() -> None:
    options = parse_stream_options(
        {**STREAM, "DeadLetter": "dead", "dead_letter_max": "7", "KAFKA.linger.ms": "5", "queryname": "q"}
    )
    assert (options.name, options.topic, options.checkpoint) == ("orders", "out", "/data/orders")
    assert (options.dead_letter, options.dead_letter_max) == ("dead", 7)
    assert options.settings["linger.ms"] == "5"
    assert options.group == "orders"
    assert parse_stream_options({**STREAM, "group": "none"}).group is None


def test_a_job_has_an_id_and_commits_no_offsets() -> None:
    options, job_id = parse_job_options({**JOB, "includeHeaders": "true"})
    assert job_id == "2026-11-15"
    assert options.group is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": ""}, "name is missing"),
        ({"name": "a/b"}, "cannot name a pipeline"),
        ({"topicc": "x"}, "did you mean topic"),
        ({"path": "/x"}, "take no path"),
        ({"wholly": "x"}, "remove it, or write kafka.wholly"),
        ({"job.id": "x"}, "job.id is for df.write"),
        ({"kafka.acks": "1"}, "acks cannot be set"),
        ({"kafka.bootstrap.servers": ""}, "bootstrap.servers is missing"),
        ({"kafka.linger.ms": "soon"}, "linger.ms"),
        ({"attempts": "many"}, "not a whole number"),
        ({"resume": "perhaps"}, "resume='perhaps' is not understood"),
        ({"checkpointLocation": ""}, "checkpointLocation is missing"),
        ({"deadLetter": "out"}, "is the output topic itself"),
    ],
)
def test_what_a_stream_cannot_have_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_stream_options({**STREAM, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"job.id": ""}, "job.id is missing"),
        ({"checkpointLocation": "/x"}, "checkpointLocation is for writeStream"),
        ({"group": "g"}, "group is for writeStream"),
        ({"resume": "committed"}, "resume is for writeStream"),
    ],
)
def test_what_a_job_cannot_have_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_job_options({**JOB, **options})


def test_a_table_that_was_made_by_sql_says_what_to_use() -> None:
    """Spark hands over none of its options."""
    with pytest.raises(ConfigError, match=r"semel\.write_batch"):
        parse_job_options({})
