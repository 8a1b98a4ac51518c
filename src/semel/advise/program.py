"""The programs that the adviser prints: templates filled with names. Each is complete and runs as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

from semel.advise.questions import Answers
from semel.client.settings import parse_bootstrap
from semel.errors import ConfigError

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,200}")
_PLACE: Final = re.compile(r"@([a-z_]+)@")
_TABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


@dataclass(frozen=True, slots=True)
class Names:
    """Names and addresses in the programs."""

    name: str = "orders-pipeline"
    bootstrap: str = "localhost:9092"
    input: str = "orders"
    output: str = "results"
    table: str = "results"
    postgres: str = "postgresql://localhost/shop"
    sqlite: str = "shop.db"
    checkpoint: str = "checkpoints/orders-pipeline"
    file: str = "records.txt"
    url: str = "http://localhost:8080/"

    def __post_init__(self) -> None:
        for what in ("name", "input", "output"):
            value = getattr(self, what)
            if not _NAME.fullmatch(value):
                raise ConfigError(f"{what} {value!r} is no legal name: use letters, digits, dots, - and _.")
        parse_bootstrap("bootstrap", self.bootstrap)
        if not _TABLE.fullmatch(self.table):
            raise ConfigError(f"table {self.table!r} is no plain name of a table: use letters, digits and _.")


@dataclass(frozen=True, slots=True)
class Program:
    """A file to write, and how to start it."""

    kind: str
    """Which template it is, and which variant."""
    file: str
    command: str
    text: str
    extras: tuple[str, ...] = ()
    """Of semel."""
    packages: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()


# How an instance gets the number that it has again after a restart, and so a stable transactional.id.
_INSTANCE: Final[Mapping[str, tuple[str, str]]] = {
    "single": ("", 'INSTANCE = "0"  # there is one; a restart fences the process before it\n'),
    "indexed": (
        "import os\n",
        'INSTANCE = os.environ["INSTANCE"]  # 0, 1, 2, ...: never one number for two processes\n',
    ),
    "statefulset": (
        "import os\nimport sys\n",
        'POD = os.environ["HOSTNAME"]  # name-0, name-1, ...: a StatefulSet gives a pod its name again\n'
        'INSTANCE = POD.rpartition("-")[2]\n'
        "if not INSTANCE.isdigit():\n"
        '    sys.exit(f"{POD} is no pod of a StatefulSet: its name changes, and nobody would end its transactions.")\n',
    ),
}

_SQL: Final[Mapping[str, Mapping[str, str]]] = {
    "sqlite": {
        "import_first": "import sqlite3\n",
        "import_third": "",
        "connect": "sqlite3.connect(DATABASE)",
        "replace": "INSERT INTO {table} VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET product = excluded.product",
        "add": "INSERT INTO {table} VALUES (?, ?)",
    },
    "postgres": {
        "import_first": "",
        "import_third": "import psycopg\n",
        "connect": "psycopg.connect(DATABASE)",
        "replace": "INSERT INTO {table} VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET product = excluded.product",
        "add": "INSERT INTO {table} VALUES (%s, %s)",
    },
}


@dataclass(slots=True)
class _Blank:
    """A template to fill."""

    template: str
    file: str
    variant: str = ""
    values: dict[str, str] = field(default_factory=dict[str, str])
    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    topics: tuple[str, ...] = ()
    command: str = ""


def build(answers: Answers, guarantee: str, names: Names) -> tuple[Program, ...]:
    """The programs for a decision."""
    return tuple(_fill(blank, names) for blank in _choose(answers, guarantee, names))


def templates() -> list[str]:
    """All templates there are."""
    return sorted(one.name.removesuffix(".py.txt") for one in _folder().iterdir() if one.name.endswith(".py.txt"))


def _folder():
    return files("semel.advise") / "programs"


def _fill(blank: _Blank, names: Names) -> Program:
    text = (_folder() / f"{blank.template}.py.txt").read_text(encoding="utf-8")
    values = {**{one: json.dumps(getattr(names, one)) for one in names.__slots__}, **blank.values}
    text = _PLACE.sub(lambda place: values[place[1]], text)  # in one pass: a value may have such a text in it
    kind = f"{blank.template}/{blank.variant}" if blank.variant else blank.template
    command = blank.command or f"python {blank.file}"
    return Program(kind, blank.file, command, text, blank.extras, blank.packages, blank.topics)


def _choose(answers: Answers, guarantee: str, names: Names) -> Iterator[_Blank]:
    if answers.platform == "spark":
        yield from _spark(answers, names)
    elif answers.source == "database":
        yield from _outbox(answers, guarantee, names)
    elif answers.source == "program":
        yield _producer(answers, guarantee, names)
    elif answers.target == "kafka":
        yield _copier(answers, guarantee, names)
    elif answers.target == "calls":
        yield _caller(answers, guarantee, names)
    else:
        yield _table_writer(answers, guarantee, names)


def _copier(answers: Answers, guarantee: str, names: Names) -> _Blank:
    topics = (names.input, names.output)
    if guarantee == "exactly-once":
        return _Blank(
            "kafka_exactly_once",
            "pipeline.py",
            answers.deployment,
            _instance(answers),
            topics=topics,
            command=_start(answers, "pipeline.py"),
        )
    kind = guarantee.replace("-", "_")
    return _Blank(f"kafka_{kind}", "pipeline.py", "", _poll(answers), (), ("confluent-kafka",), topics)


def _instance(answers: Answers) -> dict[str, str]:
    imports, lines = _INSTANCE[answers.deployment]
    return {"imports": imports, "gap": "\n" if imports else "", "instance": lines.rstrip("\n")}


def _start(answers: Answers, file: str) -> str:
    return f"INSTANCE=0 python {file}" if answers.deployment == "indexed" else f"python {file}"


def _poll(answers: Answers) -> dict[str, str]:
    """Librdkafka leaves a group whose member has not polled for so long."""
    return {"poll_ms": f"{max(300_000, round((answers.work_s or 0) * 2_000)):_}"}


def _producer(answers: Answers, guarantee: str, names: Names) -> _Blank:
    topics = (names.output,)
    if guarantee == "exactly-once":
        return _Blank(
            "producer_exactly_once",
            "producer.py",
            answers.deployment,
            _instance(answers),
            topics=topics,
            command=_start(answers, "producer.py"),
        )
    if guarantee == "at-least-once":
        return _Blank("producer_at_least_once", "producer.py", topics=topics)
    return _Blank("producer_at_most_once", "producer.py", packages=("confluent-kafka",), topics=topics)


def _caller(answers: Answers, guarantee: str, names: Names) -> _Blank:
    if answers.loss == "yes":
        return _Blank(
            "calls_at_most_once", "calls.py", "", _poll(answers), packages=("confluent-kafka",), topics=(names.input,)
        )
    if guarantee == "at-least-once":
        return _Blank(
            "calls_at_least_once", "calls.py", "", _poll(answers), packages=("confluent-kafka",), topics=(names.input,)
        )
    return _effects(answers, names, names.input)


def _effects(answers: Answers, names: Names, topic: str) -> _Blank:
    takes_key = answers.takes_key == "yes"
    lease_s = max(60, round((answers.work_s or 0) * 2))
    failed = f"{names.name}-failed"
    values = {
        "takes_key": str(takes_key),
        "topic": json.dumps(topic),
        "lease_s": str(lease_s),
        "call_s": str(lease_s // 2),
        "dead_letter": json.dumps(failed),
    }
    variant = "with-key" if takes_key else "without-key"
    return _Blank("calls_claimed", "calls.py", variant, values, topics=(topic, failed))


def _table_writer(answers: Answers, guarantee: str, names: Names) -> _Blank:
    topics = (names.input,)
    variant = f"{answers.target}-{answers.writes}"
    if guarantee == "exactly-once":
        values = {"target": _target(answers, names, create=True)}
        return _Blank("table_exactly_once", "pipeline.py", variant, values, _extras(answers), (), topics)
    sql = _SQL[answers.target]
    key = "id BIGINT PRIMARY KEY" if answers.writes == "replace" else "id BIGINT"
    values = {
        "import_first": sql["import_first"],
        "import_third": sql["import_third"],
        "connect": sql["connect"],
        "address": json.dumps(names.sqlite if answers.target == "sqlite" else names.postgres),
        "create_sql": f'"CREATE TABLE IF NOT EXISTS {names.table} ({key}, product TEXT)"',
        "insert_sql": f'"{sql[answers.writes].format(table=names.table)}"',
        **_poll(answers),
    }
    kind = guarantee.replace("-", "_")
    return _Blank(f"table_{kind}", "pipeline.py", variant, values, _extras(answers), ("confluent-kafka",), topics)


def _extras(answers: Answers) -> tuple[str, ...]:
    where = answers.database if answers.source == "database" else answers.target
    return ("postgres",) if where == "postgres" else ()


def _target(answers: Answers, names: Names, *, create: bool, version: str = "") -> str:
    kind, address = ("SQLite", names.sqlite) if answers.target == "sqlite" else ("Postgres", names.postgres)
    mode = 'mode="append"' if answers.writes == "add" else f'mode="upsert", key=["id"]{version}'
    made = ", create=True" if create else ""
    return f"semel.{kind}({json.dumps(address)}, table={json.dumps(names.table)}, {mode}{made})"


def _outbox(answers: Answers, guarantee: str, names: Names) -> Iterator[_Blank]:
    topics, start = (names.output,), "python service.py tea milk"
    sql = _SQL[answers.database]
    mark = "?" if answers.database == "sqlite" else "%s"
    is_sqlite = answers.database == "sqlite"
    number = "INTEGER PRIMARY KEY" if is_sqlite else "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
    values = {
        "import_first": sql["import_first"],
        "import_third": sql["import_third"],
        "connect": sql["connect"],
        "address": json.dumps(names.sqlite if answers.database == "sqlite" else names.postgres),
        "create_sql": f'"CREATE TABLE IF NOT EXISTS {names.table} (id {number}, item TEXT)"',
        "insert_returning_sql": f'"INSERT INTO {names.table} (item) VALUES ({mark}) RETURNING id"',
        "outbox_sql": f'"INSERT INTO outbox (topic, key, value) VALUES ({mark}, {mark}, {mark})"',
    }
    if guarantee == "at-most-once":
        yield _Blank("after_commit", "service.py", answers.database, values, _extras(answers), (), topics, start)
        return
    make = {
        "sqlite": "if not connection.execute(\"SELECT 1 FROM sqlite_master WHERE name = 'outbox'\").fetchone():\n"
        '        connection.executescript(semel.outbox_table_sql("sqlite"))',
        "postgres": "if connection.execute(\"SELECT to_regclass('outbox')\").fetchone() == (None,):\n"
        "        connection.execute(semel.outbox_table_sql())",
    }
    values["make_outbox"] = make[answers.database]
    yield _Blank("outbox_service", "service.py", answers.database, values, _extras(answers), (), topics, start)
    yield _Blank("outbox_relay", "relay.py", answers.database, values, _extras(answers), (), topics)


def _spark(answers: Answers, names: Names) -> Iterator[_Blank]:
    extras = ("spark", *_extras(answers))
    if answers.source == "program":
        if answers.target == "kafka":
            yield _Blank("spark_job", "job.py", "", {}, extras, (), (names.output,), "python job.py 2026-11-15")
        else:
            values = {"target": _target(answers, names, create=True)}
            variant = f"{answers.target}-{answers.writes}"
            yield _Blank("spark_job_table", "job.py", variant, values, extras, (), (), "python job.py 2026-11-15")
        return
    if answers.target in ("kafka", "calls"):
        yield _Blank("spark_stream", "job.py", "", {}, extras, (), (names.input, names.output))
    else:
        values = {"target": _target(answers, names, create=True, version=', version="offset"')}
        variant = f"{answers.target}-{answers.writes}"
        yield _Blank("spark_stream_table", "job.py", variant, values, extras, (), (names.input,))
    if answers.target == "calls":
        yield _effects(answers, names, names.output)
