"""Every command, also those that come later: wrong flags, no broker, no rights, no terminal, a pipe whose reader has
gone, Ctrl-C, and JSON into a program. One sentence each, the right exit status, and no stack trace."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import typer
from preloaded import Ended, Preloaded
from typer.testing import CliRunner

import semel
from semel.broker.process import Broker
from semel.cli.main import app

NOBODY = "127.0.0.1:1"
DATABASE_GONE = f"postgresql://nobody@{NOBODY}/x"
ON_BOOTSTRAP = ("--bootstrap", "{broker}")
ON_TARGET = ("--target", "{broker}")
ON_BOTH = ("--from", "{broker}", "--to", "{other}")

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What a command is called with, and the status it ends with. Text in place of a status says why there is none."""

    arguments: str = ""
    cluster: tuple[str, ...] = ()
    no_broker: int | str = "it talks to no cluster"
    no_rights: int | str = "it talks to no cluster"
    piped: int | str = 141
    interrupted: int | str = "it is over at once"
    interrupts: int = 1
    json: str | None = None
    """Arguments of a run that prints JSON, or why there is none here."""


def asks(arguments: str = "", *, no_rights: int = 1, json: str | None = None) -> Case:
    """A command that asks the cluster and prints what it was told."""
    return Case(arguments, ON_BOOTSTRAP, 1, no_rights, interrupted=130, json=json or f"{arguments} --json")


HIDDEN = "it waits for topics that it may see, and says so"
ONE_CLUSTER = "it needs a second cluster to have anything to print; until_stopped has it, as for relay"
LONG = "its own tests: it runs for seconds"

TABLE: dict[Words, Case] = {
    ("advise",): Case(interrupted="test_ctrl_c_at_a_question", json="--json"),
    ("bench",): Case("nothing", piped="it prints when it has measured", interrupted="tried by hand", json=LONG),
    ("broker",): Case("--port 0", interrupted="tests/broker has it"),
    ("capture",): Case(
        f"{DATABASE_GONE} --name c --outbox outbox --retry-s 0.1",
        ON_BOOTSTRAP,
        no_broker=1,
        no_rights="it looks at the database first",
        piped="it prints when Postgres answers; until_stopped has the rest, as for relay",
        interrupted="it waits for Postgres; as relay",
    ),
    ("demo",): Case(interrupted="tests/demo/test_demo_run.py has it"),
    ("doctor",): Case("--watch 0s", ON_BOOTSTRAP, 2, 0, interrupted=130, json="--watch 0s --json"),
    ("guarantees",): Case("--time 1s", ON_TARGET, 2, 2, interrupted=130, json=LONG),
    ("inspect", "groups"): asks(no_rights=0),
    ("inspect", "ledger"): asks(),
    ("inspect", "producers"): asks("{topic}"),
    ("inspect", "topic"): asks("{topic}:0"),
    ("inspect", "transactions"): asks(no_rights=0),
    ("metrics", "alerts"): Case(),
    ("metrics", "dashboard"): Case(json=""),
    ("metrics", "list"): Case(json="--json"),
    ("mirror",): Case("--topics {topic} --name m --retry-s 0.1", ON_BOTH, 1, HIDDEN, ONE_CLUSTER, 130, interrupts=2),
    ("produce",): asks("{topic} --json", json="{topic} --json"),
    ("relay",): Case("{sqlite} --name r --retry-s 0.1", ON_BOOTSTRAP, 1, 1, interrupted=130, interrupts=2),
    ("tail",): asks("{topic}"),
    ("topics", "create"): asks("{topic}-3", json="{topic}-4 --json"),
    ("topics", "delete"): asks("{topic}-1 --yes", json="{topic}-2 --yes --json"),
    ("topics", "describe"): asks("{topic}"),
    ("topics", "list"): asks(no_rights=0),
    ("ui",): Case("--port 0", ON_BOOTSTRAP, "the page says so", "the page says so", interrupted="tests/web has it"),
    ("verify",): Case("--time 1s", ON_TARGET, 2, 2, interrupted=130, json=LONG),
}


def words_of(command: Any, *before: str) -> dict[Words, Any]:
    """Each command that can be run, by its words."""
    if hasattr(command, "commands"):
        return {
            path: one for name, part in command.commands.items() for path, one in words_of(part, *before, name).items()
        }
    return {before: command}


COMMANDS = words_of(typer.main.get_command(app))


def those_with(kind: str) -> list[Any]:
    """The rows that have a status (or JSON) of this kind."""
    found = [(words, case) for words, case in TABLE.items() if wanted(getattr(case, kind))]
    return [pytest.param(words, case, id=" ".join(words)) for words, case in found]


def wanted(entry: int | str | None) -> bool:
    return isinstance(entry, int)


@dataclass(frozen=True, slots=True)
class Place:
    """Where commands run: a broker, one where nobody has any rights, one that says nothing, and files."""

    broker: str
    closed: str
    silent: str
    asked: threading.Event
    names: dict[str, str]
    commands: Preloaded

    def call(self, words: Words, case: Case, broker: str, *, arguments: str | None = None) -> list[str]:
        given = case.arguments if arguments is None else arguments
        written = [*words, *given.split(), *case.cluster]
        return [one.format(**self.names, broker=broker, other=self.broker) for one in written]

    def run(
        self, words: Words, case: Case, broker: str, *, arguments: str | None = None, stdout: str | None = None
    ) -> Ended:
        self.commands.start(self.call(words, case, broker, arguments=arguments), stdout=stdout)
        return self.commands.end()


@pytest.fixture(scope="module")
def place(semel_broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("commands")
    names = {"topic": "every-command", "sqlite": str(folder / "shop.db")}
    connection = sqlite3.connect(names["sqlite"])
    connection.executescript(semel.outbox_table_sql("sqlite"))
    connection.close()
    fill(semel_broker.bootstrap, names["topic"])
    asked = threading.Event()
    closed = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}
    with (
        Broker(config={**closed, "super.users": "User:admin"}, fsync="never") as without_rights,
        socket.create_server((NOBODY.partition(":")[0], 0)) as silent,
        Preloaded(folder) as commands,
    ):
        threading.Thread(target=hold, args=(silent, asked), daemon=True).start()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        yield Place(semel_broker.bootstrap, without_rights.bootstrap, address, asked, names, commands)


def fill(bootstrap: str, topic: str) -> None:
    """A committed and an aborted transaction, a group, and two topics to delete."""
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(topic, f"{topic}-1", f"{topic}-2", "semel-ledger", partitions=1)
        admin.commit_offsets("every-command", {(topic, 0): 0})
    with semel.Producer({"bootstrap.servers": bootstrap, "transactional.id": topic}) as producer:
        for end in (producer.commit, producer.abort):
            producer.begin()
            producer.send(topic, b"\xff\x00{]", key="\u202e".encode())
            end()


def hold(silent: socket.socket, asked: threading.Event) -> None:
    """Takes connections, and never answers."""
    held: list[socket.socket] = []
    while True:
        try:
            held.append(silent.accept()[0])
        except OSError:  # closed at the end
            return
        asked.set()


def assert_told(ended: Ended, status: int | str) -> None:
    """A sentence or two on standard error, whole on their lines."""
    assert ended.status == status, ended
    told = ended.stderr.strip().splitlines()
    assert 1 <= len(told) <= 2, ended.stderr
    assert told[-1].endswith((".", ")")), ended.stderr
    assert "Traceback" not in ended.stderr


def test_every_command_is_in_the_table() -> None:
    """And every one that can print JSON says what its JSON is."""
    assert TABLE.keys() == COMMANDS.keys()
    for words, command in COMMANDS.items():
        has_flag = any("--json" in one.opts for one in command.params)
        assert has_flag == bool(TABLE[words].json), words


@pytest.mark.parametrize("words", [words for words in TABLE if words != ("broker",)], ids=" ".join)
def test_a_wrong_flag_is_status_2_and_help_is_status_0(words: Words) -> None:
    """Nothing on standard output of the first, and no stack trace. The broker's is in tests/broker."""
    wrong = CliRunner().invoke(app, [*words, "--no-such-flag"])
    assert (wrong.exit_code, wrong.stdout) == (2, ""), wrong.output
    assert "No such option" in wrong.stderr or "Missing argument" in wrong.stderr
    assert isinstance(wrong.exception, SystemExit)
    helped = CliRunner().invoke(app, [*words, "--help"])
    assert helped.exit_code == 0
    assert f"semel {words[0]}" in " ".join(helped.stdout.split()), "help teaches with an example"


QUICK = {f"SEMEL_{side}KAFKA_DEFAULT_API_TIMEOUT_MS": "300" for side in ("", "FROM_", "TO_")}


@pytest.mark.parametrize(("words", "case"), those_with("no_broker"))
def test_no_broker_is_a_sentence(words: Words, case: Case, place: Place) -> None:
    """It names the address, or the database where that is asked first."""
    place.commands.start(place.call(words, case, NOBODY), env=QUICK)
    ended = place.commands.end()
    assert_told(ended, case.no_broker)
    assert NOBODY in ended.stderr


@pytest.mark.parametrize(("words", "case"), those_with("no_rights"))
def test_no_rights_is_a_sentence(words: Words, case: Case, place: Place) -> None:
    """Or what may be seen is shown, and that the rest may not."""
    ended = place.run(words, case, place.closed)
    if case.no_rights == 0:
        assert (ended.status, "Traceback" in ended.stderr) == (0, False), ended
    else:
        assert_told(ended, case.no_rights)
        assert "may not" in ended.stderr


@pytest.mark.parametrize(("words", "case"), those_with("piped"))
def test_output_into_a_program_that_has_ended_is_status_141(words: Words, case: Case, place: Place) -> None:
    """As of any program that a broken pipe ends, and without a word about it."""
    ended = place.run(words, case, place.broker, stdout="closed")
    assert ended.status == case.piped, ended
    assert "Broken" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("words", "case"), those_with("interrupted"))
def test_ctrl_c_is_status_130(words: Words, case: Case, place: Place) -> None:
    """While a broker does not answer. Those that end in order need it twice then."""
    place.asked.clear()
    place.commands.start(place.call(words, case, place.silent))
    assert place.asked.wait(120)
    for number in range(case.interrupts):
        if number:
            place.commands.wait_a_moment()
        place.commands.interrupt()
    ended = place.commands.end()
    assert ended.status == case.interrupted, ended
    assert "Traceback" not in ended.stderr


def as_jq_reads(text: str) -> None:
    """One document or one a line."""
    if shutil.which("jq"):
        subprocess.run(["jq", "."], input=text, text=True, check=True, capture_output=True, timeout=60)
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        _, at = decoder.raw_decode(text, at)
        assert text[at] == "\n", text[at:]
        at += 1


PRINTS_JSON = [
    pytest.param(words, case, id=" ".join(words))
    for words, case in TABLE.items()
    if case.json is not None and case.json != LONG
]


@pytest.mark.parametrize(("words", "case"), PRINTS_JSON)
def test_json_goes_into_jq(words: Words, case: Case, place: Place) -> None:
    """Nothing but JSON is on standard output, in ASCII."""
    ended = place.run(words, case, place.broker, arguments=case.json)
    assert ended.status == 0, ended
    assert ended.stdout.isascii()
    assert ended.stdout
    as_jq_reads(ended.stdout)


ASKS = {
    ("topics", "delete"): ("{topic} {ways}", "add --yes"),
    ("inspect", "transactions"): ("--watch 1 {ways}", "is for a terminal"),
    ("inspect", "groups"): ("--watch 1 {ways}", "is for a terminal"),
    ("inspect", "ledger"): ("--watch 1 {ways}", "is for a terminal"),
    ("inspect", "producers"): ("{topic} --watch 1 {ways}", "is for a terminal"),
    ("inspect", "topic"): ("{topic} --watch 1 {ways}", "is for a terminal"),
}
"""What needs a terminal. `semel inspect transactions --end` asks as `topics delete` does."""


def test_what_needs_a_terminal_says_what_to_do_without(place: Place) -> None:
    """Status 2; --yes and --watch are nowhere else."""
    flags = {
        words for words, one in COMMANDS.items() if any({"--yes", "--watch"} & {*part.opts} for part in one.params)
    }
    assert flags - {("doctor",)} == ASKS.keys(), "the doctor's --watch is a time"
    for words, (arguments, said) in ASKS.items():
        written = arguments.format(**place.names, ways=f"--bootstrap {place.broker}")
        place.commands.start([*words, *written.split()])
        ended = place.commands.end()
        assert_told(ended, 2)
        assert said in ended.stderr


def test_ctrl_c_at_a_question(place: Place) -> None:
    """On a terminal `semel advise` asks; Ctrl-C ends it with status 130."""
    leader, follower = pty.openpty()
    terminal = os.ttyname(follower)
    place.commands.start(["advise"], stdin=terminal, stdout=terminal, stderr=terminal)
    shown = b""
    while b"> " not in shown:
        assert select.select([leader], [], [], 120)[0], shown
        shown += os.read(leader, 65_536)
    place.commands.interrupt_until_it_ends()
    assert place.commands.end().status == 130
    os.close(leader)
    os.close(follower)
    assert b"Traceback" not in shown
