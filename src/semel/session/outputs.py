"""What a function returned, as records to send. Everything is checked before anything is sent.

A record that would be refused must be known by its origin; once it is in a batch with others it no longer is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from semel.client.config import ProducerConfig
from semel.errors import ConfigError, RecordTooLarge, UnknownTopic
from semel.records.arrow_encode import encode_records
from semel.records.reference import Record
from semel.session.transaction import Row

_EXPECTED: Final = (
    "return bytes (the new value; the key stays), a semel.Row such as row._replace(value=new), several of them in a "
    "list, or None to write nothing"
)


REFUSALS: Final = (UnknownTopic, RecordTooLarge, ConfigError)
"""What is wrong with a record itself. Anything else, such as a lost connection, is no reason to put it aside."""


class WrongProgram(Exception):
    """The pipeline is set up wrongly; no single record is at fault. Users get a `ConfigError`."""


class NoTopicToGoTo(WrongProgram):
    """Nothing says where a result should go, or it is a topic that does not exist."""


def check_synchronous(transform: Callable[..., Any]) -> None:
    """Refuse an `async def` function before anything is read: each of its results would be an unused coroutine."""
    if any(map(inspect.iscoroutinefunction, (transform, type(transform).__call__))):
        raise ConfigError(_NOT_ASYNC)


def refuse_awaitable(made: object) -> None:
    if inspect.isawaitable(made):
        if inspect.iscoroutine(made):
            made.close()
        raise WrongProgram(_NOT_ASYNC)


_NOT_ASYNC: Final = (
    "The function is async, and semel.run calls plain functions: nothing was written. Write it without async, or use "
    "`async with semel.Session(...)`, inside of which you can await."
)


def as_sentence(text: str) -> str:
    """The message of an error with one full stop at its end.

    >>> as_sentence("bad"), as_sentence("Bad.")
    ('bad.', 'Bad.')
    """
    text = text.rstrip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


class Output(NamedTuple):
    """One record to write."""

    topic: str
    row: Row


class OutputCheck(NamedTuple):
    """What a record is held against."""

    config: ProducerConfig
    find_topic: Callable[[str], object]
    """Raises `UnknownTopic` if there is none of this name."""
    to: str | None = None
    """The topic for what does not name its own."""

    def find(self, topic: object) -> str:
        """Return the topic, or raise if it is not there. No record is at fault if the program names it in `to`."""
        if not isinstance(topic, str):
            raise _wrong_type(topic, "a topic must be named by text")
        try:
            self.find_topic(topic)
        except UnknownTopic as error:
            if topic != self.to:
                raise
            raise NoTopicToGoTo(f"{error} It is the one that to= names, so no record was put aside.") from error
        return topic

    def check(self, topic: object, key: object, value: object, headers: Iterable[tuple[str, object]]) -> str:
        """Raise what sending this record would raise; returns the topic."""
        topic = self.find(topic)
        contents = (key, value, *(content for _, content in headers))
        for content in contents:
            if content is not None and not isinstance(content, bytes):
                raise _wrong_type(content, "keys, values and headers must be bytes or None")
        if sum(len(content) for content in contents if isinstance(content, bytes)) > self.config.request_bytes_max // 2:
            self._try_to_encode(key, value, headers)
        return topic

    def _try_to_encode(self, key: Any, value: Any, headers: Any) -> None:
        """Only an encoded batch tells whether it fits: it may be compressed."""
        encode_records(
            [Record(0, 0, key, value, tuple(headers))],
            batch_bytes_max=self.config.request_bytes_max,
            compression=self.config.compression_type,
            compression_level=self.config.compression_level,
        )


# -- rows ----------------------------------------------------------------------------------------------------------


def rows_made(made: Any, row: Row) -> list[Row]:
    """What a function made of `row`; a generator runs here."""
    refuse_awaitable(made)
    return list(_rows(made, row))


def outputs_of_rows(made: Iterable[Row], row: Row, to: str | None, check: OutputCheck) -> list[Output]:
    """The records to write. Raises one of `REFUSALS` if one of them would be refused."""
    outputs: list[Output] = []
    for one in made:
        # A row that still has the topic it was read from was not meant to go back there.
        topic = one.topic if one.topic != row.topic else to
        if topic is None and one.topic == row.topic:
            raise NoTopicToGoTo("A row has no topic to go to: write to=..., or return rows with another topic.")
        outputs.append(Output(check.check(topic, one.key, one.value, one.headers), one))
    return outputs


def _rows(made: Any, row: Row) -> Iterator[Row]:
    if made is None:
        return
    if isinstance(made, bytes):
        yield row._replace(value=made)
        return
    if isinstance(made, Row):
        yield made
        return
    # A tuple is easily meant as (key, value), and a dict as {key: value}: their parts are not the values of records.
    if isinstance(made, (str, tuple, Mapping)) or not isinstance(made, Iterable):
        raise _wrong_type(made, _EXPECTED)
    for one in made:
        if isinstance(one, bytes):
            yield row._replace(value=one)
        elif isinstance(one, Row):
            yield one
        else:
            raise _wrong_type(one, _EXPECTED)


def _wrong_type(made: object, expected: str) -> ConfigError:
    hint = " For text, return it as bytes: text.encode()." if isinstance(made, str) else ""
    return ConfigError(
        f"A function returned {type(made).__name__} ({_short(made)}), which cannot be written as it is: {expected}."
        f"{hint}"
    )


def _short(made: object) -> str:
    text = repr(made)
    return text if len(text) <= 60 else text[:59] + "…"


# -- tables --------------------------------------------------------------------------------------------------------


def outputs_of_table(made: Any, to: str | None, check: OutputCheck) -> list[tuple[str | None, pa.Table]]:
    """The tables that a function made of a table, each with its topic; None: the table has a column of topics."""
    if made is None:
        return []
    refuse_awaitable(made)
    tables = list(made.items()) if isinstance(made, Mapping) else [(to, made)]
    for topic, table in tables:
        if isinstance(made, Mapping):
            check.find(topic)
        if not isinstance(table, pa.Table):
            raise _wrong_type(table, "return a pyarrow.Table, a mapping from topic to table, or None")
        _check_table(topic, table, check)
    return tables


def _check_table(topic: str | None, table: pa.Table, check: OutputCheck) -> None:
    names = table.column_names
    if topic is None and "topic" not in names:
        raise NoTopicToGoTo('A table has no topic to go to: write to=..., or give it a column "topic".')
    if topic is None and "offset" in names:
        raise NoTopicToGoTo(
            'A table still has the columns of what was read, so its "topic" says where records came from, and they '
            "would go back there: write to=..., or return only the columns to write."
        )
    for named in [topic] if topic is not None else table["topic"].unique().to_pylist():
        check.find(named)
    columns = [table[name] for name in ("key", "value") if name in names and pa.types.is_binary(table[name].type)]
    half = check.config.request_bytes_max // 2
    large: set[int] = set()
    for column in columns:
        lengths = pc.call_function("binary_length", [column]).fill_null(0)
        over = pc.call_function("greater", [lengths, pa.scalar(half // len(columns))])
        large.update(pc.call_function("indices_nonzero", [over]).to_pylist())
    for index in sorted(large):
        row = {name: table[name][index].as_py() for name in ("key", "value") if name in names}
        check.check(topic or table["topic"][index].as_py(), row.get("key"), row.get("value"), ())
