"""Mistakes in a program that calls `semel.run`: one clear error at once, and no record is put aside for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from session_scene import BROKER_CONFIG, Pipeline

import semel
from semel.client.admin import Admin
from semel.errors import ConfigError, RecordFailed
from semel.session.runner import run
from semel.testing.embedded import EmbeddedBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture
def pipeline(broker: EmbeddedBroker) -> Pipeline:
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    with Admin({"bootstrap.servers": broker.bootstrap}) as admin:
        admin.create_topics(f"{pipeline.target}-dead")
    return pipeline


def options(pipeline: Pipeline, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap": pipeline.bootstrap,
        "group": pipeline.group,
        "topics": [pipeline.source],
        "name": pipeline.group,
        "to": pipeline.target,
        "fetch_max_wait_ms": 50,
        "idle_ms": 500,
        **more,
    }


def dead_letters(pipeline: Pipeline) -> int:
    with semel.Fetcher({"bootstrap.servers": pipeline.bootstrap}) as fetcher:
        fetcher.assign({(f"{pipeline.target}-dead", 0): "earliest"})
        return sum(fetcher.end_offsets().values())


@pytest.mark.parametrize("with_dead_letters", [False, True])
def test_a_function_of_rows_without_by_row_is_told_so(pipeline: Pipeline, with_dead_letters: bool) -> None:
    """The program's mistake: no record is at fault, so none is put aside."""
    more = {"dead_letter": f"{pipeline.target}-dead"} if with_dead_letters else {}
    with pytest.raises(ConfigError, match='by="row"'):
        run(lambda row: row.value, **options(pipeline, **more))
    assert dead_letters(pipeline) == 0


async def coroutine(row: semel.Row) -> bytes | None:
    return row.value


class Asynchronous:
    async def __call__(self, row: semel.Row) -> bytes | None:
        return row.value


@pytest.mark.parametrize("transform", [coroutine, Asynchronous(), lambda row: coroutine(row)])
@pytest.mark.parametrize("by", ["row", "table"])
def test_an_async_function_is_refused_and_no_record_put_aside(pipeline: Pipeline, transform: Any, by: Any) -> None:
    """With dead letters too, which would otherwise fill with every record of the topic."""
    with pytest.raises(ConfigError, match="async"):
        run(transform, by=by, **options(pipeline, dead_letter=f"{pipeline.target}-dead"))
    assert dead_letters(pipeline) == 0


def test_a_function_of_rows_may_return_several_values(pipeline: Pipeline) -> None:
    """A list of bytes is as good as a list of rows; the key stays."""
    report = run(lambda row: [row.value, row._replace(value=row.value)], by="row", **options(pipeline))
    assert report.records == 20
    assert set(pipeline.counts().values()) == {2}


@pytest.mark.parametrize(
    ("transform", "kind"), [(lambda row: (b"key", row.value), "tuple"), (lambda row: {b"key": row.value}, "dict")]
)
def test_a_pair_or_a_dict_is_not_taken_for_a_list_of_values(pipeline: Pipeline, transform: Any, kind: str) -> None:
    """People mean key and value by it. Each part became the value of a record."""
    with pytest.raises(RecordFailed, match=f"returned {kind} "):
        run(transform, by="row", **options(pipeline))
    assert pipeline.counts() == {}


@pytest.mark.parametrize("transform", [lambda row: "text", lambda row: 1 / 0])
def test_messages_have_one_full_stop(pipeline: Pipeline, transform: Any) -> None:
    """A cause that is a sentence of its own is not given another end."""
    with pytest.raises(RecordFailed) as caught:
        run(transform, by="row", **options(pipeline))
    assert ".." not in str(caught.value)
    assert ". The transaction was aborted" in str(caught.value)


def test_a_table_that_cannot_be_written_names_the_type_and_one_full_stop(pipeline: Pipeline) -> None:
    """The same for functions of tables."""
    with pytest.raises(RecordFailed, match="list") as caught:
        run(lambda table: pa.Table.to_pylist(table), **options(pipeline))
    assert ".." not in str(caught.value)


@pytest.mark.parametrize(("wrong", "right"), [("group_id", "group"), ("topic", "topics")])
def test_an_option_by_another_name_is_answered_with_its_name_here(pipeline: Pipeline, wrong: str, right: str) -> None:
    """`group_id=` of other clients is `group=` here, and the error says so."""
    given = options(pipeline)
    given[wrong] = given.pop(right)
    with pytest.raises(TypeError, match=f"write {right}="):
        run(lambda row: row.value, by="row", **given)


def test_a_fenced_instance_is_told_about_instance() -> None:
    """Users of sessions never wrote a transactional.id."""
    from semel.client.failures import failure
    from semel.wire import Api, ErrorCode

    assert "`instance`" in str(failure(ErrorCode.producer_fenced, Api.INIT_PRODUCER_ID, "x"))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"dead_leter": "x"}, "did you mean dead_letter="),
        ({"idel_ms": 5}, "did you mean idle_ms="),
        ({"bootstrap_server": "x"}, "did you mean bootstrap"),
        ({"checkpoint": "x"}, "no option checkpoint="),
    ],
)
def test_a_mistyped_option_is_answered_with_the_nearest_one(
    tmp_path: Path, options: dict[str, Any], advice: str
) -> None:
    """Semel's own options first: a user of semel.run did not write a setting of Kafka's."""
    for to in ("out", semel.SQLite(tmp_path / "a.db", table="t")):
        given = {"bootstrap": "127.0.0.1:1", "topics": ["in"], "name": "n", "group": "g", **options}
        if isinstance(to, semel.SQLite) and "dead_leter" in options:
            continue  # an option of the target there
        with pytest.raises(semel.ConfigError, match=advice):
            semel.run(lambda row: row.value, by="row", to=to, **given)
