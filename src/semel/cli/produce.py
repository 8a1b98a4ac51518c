"""`semel produce TOPIC`: lines from standard input as records, in one transaction if wanted."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import typer

from semel.cli.connecting import Bootstrap, ConfigFile, ProfileName, Setting, client_settings
from semel.cli.output import AsJson, expected_errors, print_json
from semel.client.producer import Outcome, Producer
from semel.client.sender import Stored
from semel.errors import CommitUnknown, ConfigError, SemelError
from semel.inspect.shown import show_text

_FLUSH_EVERY: Final = 20_000
_TRANSACTION_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Line:
    """A record as it was typed."""

    key: bytes | None
    value: bytes | None


def produce(
    topic: Annotated[str, typer.Argument(help="Where to; it must exist.")],
    key_separator: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What stands between key and value in each line.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A header for each record; may be repeated.")
    ] = None,
    null: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A key or value that is exactly this becomes null.")
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only into this partition.")] = None,
    transaction: Annotated[
        bool, typer.Option("--transaction", help="All lines in one transaction: all are seen, or none.")
    ] = False,
    transactional_id: Annotated[
        str | None, typer.Option(help="The transaction's id; fences others of this id. A new one without.")
    ] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = None,
    profile: ProfileName = None,
    config: ConfigFile = None,
    setting: Setting = None,
) -> None:
    """Write the lines of standard input as records of a topic.

    Bytes are taken as they are. With --transaction, input is read to its end
    first, so that the transaction is open only while it is written.

    \b
    printf '10\\n20\\n' | semel produce orders --bootstrap localhost:9092
    printf 'a:10\\nb:20\\n' | semel produce orders --key-separator : --transaction
    semel produce orders --header source=shop < orders.txt
    """
    with expected_errors():
        if key_separator == "":
            raise ConfigError("--key-separator is empty: write the text between key and value. Nothing was written.")
        is_transactional = transaction or transactional_id is not None
        more: dict[str, object] = {}
        if is_transactional:
            more["transactional.id"] = transactional_id or f"semel-produce-{uuid.uuid4()}"
        settings = client_settings(bootstrap, profile, config, setting, is_producer=True, more=more)
        if not is_transactional:
            settings.pop("transactional.id", None)  # a file may have one, and this is not its producer
        headers = [_parse_header(text) for text in header or []]
        lines = _read_lines(sys.stdin.buffer, key_separator, null)
        writer = _Writer(topic, partition, headers)
        if sys.stdin.isatty():
            typer.echo("One record a line; Ctrl-D ends.", err=True)
        try:
            if is_transactional:
                writer.write_whole(settings, lines)
            else:
                writer.write_each(settings, lines)
        except (SemelError, KeyboardInterrupt) as error:
            typer.echo(writer.what_is_written(error, is_transactional=is_transactional), err=True)
            raise
        _report(writer.stored, topic, is_transactional=is_transactional, as_json=as_json)


def _parse_header(text: str) -> tuple[str, bytes]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"{show_text(text)!r} is no header: write NAME=VALUE. Nothing was written.")
    return name, value.encode("utf-8", "surrogateescape")


def _read_lines(source: Iterable[bytes], key_separator: str | None, null: str | None) -> Iterator[Line]:
    """
    >>> list(_read_lines([b"a:1\\n", b"b:-\\n"], ":", "-"))
    [Line(key=b'a', value=b'1'), Line(key=b'b', value=None)]
    """
    separator = None if key_separator is None else key_separator.encode("utf-8", "surrogateescape")
    nothing = None if null is None else null.encode("utf-8", "surrogateescape")
    for number, line in enumerate(source, 1):
        value: bytes = line.removesuffix(b"\n")
        key: bytes | None = None
        if separator is not None:
            key, found, value = value.partition(separator)
            if not found:
                raise ConfigError(
                    f"Line {number} has no {show_text(key_separator)!r} between key and value: it was not written."
                )
        yield Line(None if key == nothing else key, None if value == nothing else value)


class _Writer:
    def __init__(self, topic: str, partition: int | None, headers: list[tuple[str, bytes]]) -> None:
        self._topic = topic
        self._partition = partition
        self._headers = headers
        self._sent = 0
        self._stage: Literal["open", "committing", "unknown", "committed"] = "open"
        self.stored: list[Stored] = []

    def write_each(self, settings: dict[str, object], lines: Iterable[Line]) -> None:
        with Producer(settings) as producer:
            try:
                for line in lines:
                    self._send(producer, line)
                    if self._sent % _FLUSH_EVERY == 0:
                        self.stored += producer.flush()
            except (ConfigError, KeyboardInterrupt):
                self.stored += producer.flush()  # what was read before it
                raise
            self.stored += producer.flush()

    def write_whole(self, settings: dict[str, object], lines: Iterable[Line]) -> None:
        held, size = list[Line](), 0
        for line in lines:
            held.append(line)
            size += len(line.value or b"") + len(line.key or b"") + 100
            if size > _TRANSACTION_BYTES_MAX:
                raise ConfigError("The input is over 1 GiB, too much for one transaction. Nothing was written.")
        with Producer(settings) as producer:
            try:
                with producer.transaction():
                    for line in held:
                        self._send(producer, line)
                    self.stored = producer.flush()
                    self._stage = "committing"
            except CommitUnknown as error:
                self._stage = "unknown"  # and stays so if the next line raises
                if producer.resolve() is not Outcome.COMMITTED:
                    self._stage = "open"
                    raise _aborted() from error
            self._stage = "committed"

    def _send(self, producer: Producer, line: Line) -> None:
        producer.send(self._topic, line.value, key=line.key, headers=self._headers, partition=self._partition)
        self._sent += 1

    def what_is_written(self, error: BaseException, *, is_transactional: bool) -> str:
        if self._stage == "committed":
            return "The transaction is committed: all lines are seen."
        if self._stage == "unknown" or (self._stage == "committing" and isinstance(error, KeyboardInterrupt)):
            return "Whether the transaction is committed is not known: look with semel tail before you repeat it."
        if is_transactional:
            return "The transaction is not committed: readers of committed records see none of the lines."
        safe = sum(one.record_count for one in self.stored)
        if safe == self._sent:
            return f"Stored before it: {_records(safe)}."
        return f"Stored before it: {_records(safe)}; of {self._sent - safe} more this is not certain."


def _aborted() -> SemelError:
    return SemelError("The transaction was aborted; nothing of it will be seen. Repeat the command.")


def _report(stored: list[Stored], topic: str, *, is_transactional: bool, as_json: bool) -> None:
    count = sum(one.record_count for one in stored)
    if as_json:
        batches = [
            {
                "topic": one.topic,
                "partition": one.partition,
                "base_offset": one.base_offset,
                "records": one.record_count,
            }
            for one in stored
        ]
        print_json({"records": count, "in_transaction": is_transactional, "batches": batches})
        return
    where = f" to {show_text(topic, longest=None)}"
    typer.echo(f"{_records(count)}{where}{', in one transaction' if is_transactional else ''}.", err=True)


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"
