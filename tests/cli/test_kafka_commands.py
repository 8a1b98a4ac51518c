"""`semel topics`, `produce`, `tail` and `inspect` as a user types them, on a real broker."""

# confluent-kafka hands its names on without saying so to type checkers.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from typer.testing import CliRunner, Result

import semel
from semel.broker.process import Broker
from semel.cli.main import app

SEMEL = [sys.executable, "-c", "from semel.cli.entry import main; main()"]
HOSTILE = b"\x1b[2J<script>\xff\x00" + "\u202e[red]".encode()

Run = Callable[..., Result]


@pytest.fixture
def run(semel_broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command against the broker that SEMEL_BOOTSTRAP names, and checks that no stack trace comes of it."""
    monkeypatch.setenv("SEMEL_BOOTSTRAP", semel_broker.bootstrap)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("SEMEL_PROFILE", "SEMEL_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*arguments: str, input: bytes = b"") -> Result:
        result = CliRunner().invoke(app, list(arguments), input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert result.output.replace("\n", "").isprintable()
        return result

    return invoke


def lines(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_topics_are_created_listed_described_and_deleted(run: Run) -> None:
    """Deleting asks first, and without a terminal refuses."""
    assert (
        run("topics", "create", "t-a", "t-b", "--partitions", "3", "--topic-setting", "retention.ms=12345").exit_code
        == 0
    )
    assert {"t-a", "t-b"} <= set(json.loads(run("topics", "list", "--json").stdout))
    [told] = json.loads(run("topics", "describe", "t-a", "--json").stdout)
    assert (len(told["partitions"]), told["settings"]) == (3, {"retention.ms": "12345"})
    assert "retention.ms=12345" in run("topics", "describe", "t-a").stdout

    refused = run("topics", "delete", "t-a")

    assert (refused.exit_code, "add --yes" in refused.stderr) == (2, True)
    assert run("topics", "delete", "t-a", "t-b", "--yes").exit_code == 0
    assert not {"t-a", "t-b"} & set(json.loads(run("topics", "list", "--json").stdout))
    assert run("topics", "describe", "t-a").exit_code == 1


def test_lines_become_records_with_keys_headers_and_nulls(run: Run) -> None:
    """Bytes as they are: no line is changed, whatever is in it."""
    run("topics", "create", "p-keys")
    result = run(
        *("produce", "p-keys", "--key-separator", "::", "--null", "NULL", "--header", "a=b=c"),
        input=b"k::v::w\n::\n" + HOSTILE.replace(b"\x00", b"") + b"::NULL\nk::last",
    )
    assert (result.exit_code, result.stderr) == (0, "4 records to p-keys.\n")
    with semel.Fetcher({"bootstrap.servers": os.environ["SEMEL_BOOTSTRAP"]}) as fetcher:
        fetcher.assign({("p-keys", 0): "earliest"})
        read = [row for table in fetcher.read_until(fetcher.end_offsets()) for row in table.to_pylist()]
    hostile = HOSTILE.replace(b"\x00", b"")
    assert [(one["key"], one["value"]) for one in read] == [
        (b"k", b"v::w"),
        (b"", b""),
        (hostile, None),
        (b"k", b"last"),
    ]
    assert read[0]["headers"] == [{"key": "a", "value": b"b=c"}]


def test_a_transaction_takes_all_lines_or_none(run: Run) -> None:
    """A line without its key ends it; nothing of it is seen. Without a transaction the lines before it are stored."""
    run("topics", "create", "p-all")
    arguments = ("produce", "p-all", "--key-separator", ":")

    refused = run(*arguments, "--transaction", input=b"a:1\nb\n")
    assert (refused.exit_code, run("tail", "p-all", "--json").stdout) == (2, "")
    assert "Line 2 has no ':'" in refused.stderr
    written = run(*arguments, "--transaction", "--json", input=b"a:1\nb:2\n")
    assert json.loads(written.stdout)["records"] == 2
    partial = run(*arguments, input=b"c:3\nd\n")

    assert (partial.exit_code, "Stored before it: 1 record." in partial.stderr) == (2, True)
    shown = lines(run("tail", "p-all", "--json"))
    assert [one["status"] for one in shown] == ["committed", "committed", "marker", "plain"]


def test_tail_tells_open_aborted_and_committed_records_apart(run: Run, semel_broker: Broker) -> None:
    """And escapes what could act on a terminal; --committed shows what readers of committed records see."""
    run("topics", "create", "tailed", "--partitions", "1")
    settings = {"bootstrap.servers": semel_broker.bootstrap, "transactional.id": "tailed"}
    with semel.Producer(settings) as producer:
        for value, ending in ((b"yes", producer.commit), (HOSTILE, producer.abort), (b"x" * 5_000, producer.flush)):
            producer.begin()
            producer.send("tailed", value, key=HOSTILE, headers=[("\x1b[31m", HOSTILE)])
            producer.flush()
            ending()

        text = run("tail", "tailed").stdout

        words = [line.split()[1] for line in text.splitlines()]
        assert words == ["committed", "commit", "aborted", "abort", "open"]
        assert "\\x1b[2J<script>\\xff\\x00\\u202e[red]" in text
        assert "(5000 bytes)" in text
        assert max(map(len, text.splitlines())) < 600
        shown = lines(run("tail", "tailed:0", "--json", "--from", "2"))
        assert [one["offset"] for one in shown] == [2, 3, 4]
        assert "value_base64" in shown[0]
        assert len(shown[2]["value"]) == 5_000
        assert len(run("tail", "tailed", "--committed").stdout.splitlines()) == 1
        producer.abort()


def test_hostile_names_of_groups_and_ids_are_shown_harmlessly(run: Run, semel_broker: Broker) -> None:
    """Kafka takes any text there. In JSON it stays what it is."""
    name = "\x1b[2J\u202e[red]<script>"
    run("topics", "create", "host.ile_topic-1")
    settings = {"bootstrap.servers": semel_broker.bootstrap}
    with semel.Admin(settings) as admin:
        admin.commit_offsets(name, {("host.ile_topic-1", 0): 0})
    with semel.Producer({**settings, "transactional.id": name}) as producer, producer.transaction():
        producer.send("host.ile_topic-1", HOSTILE)
        producer.flush()
        assert "\\x1b[2J\\u202e[red]<script>" in run("inspect", "transactions").stdout
        [held] = json.loads(run("inspect", "transactions", "--topic", "host.ile_topic-1", "--json").stdout)["held"]
        assert (held["holder"]["transactional_id"], held["holder"]["standing"]) == (name, "alive")
    assert "\\x1b[2J" in run("inspect", "groups").stdout
    [group] = json.loads(run("inspect", "groups", name, "--json").stdout)
    assert (group["group"], group["lag"]["readable"]) == (name, 1)
    assert run("inspect", "producers", "host.ile_topic-1").exit_code == 0
    explained = run("inspect", "topic", "host.ile_topic-1:0", "--offset", "0")
    assert "committed by the marker at offset 1" in explained.stdout
    assert "ends the transaction" in run("inspect", "topic", "host.ile_topic-1:0", "--offset", "1").stdout
    [batch, marker] = json.loads(run("inspect", "topic", "host.ile_topic-1:0", "--json").stdout)["batches"]
    assert (batch["status"], marker["marker"]) == ("committed", "commit")
    assert "everyone" in run("inspect", "topic", "host.ile_topic-1:0", "--records").stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ["topics", "list", "--bootstrap", "127.0.0.1:1", "--setting", "default.api.timeout.ms=500"],
            1,
            "No connection to 127.0.0.1:1",
        ),
        (["topics", "list", "--bootstrap", "nonsense"], 2, "has no port"),
        (["topics", "list", "--profile", "nope"], 2, "nope"),
        (["topics", "list", "--config", "/nope"], 2, "'/nope' cannot be read (No such file or directory)"),
        (["topics", "list", "--setting", "sasl.usrname=x"], 2, "sasl.username"),
        (["topics", "list", "--nope"], 2, "No such option"),
        (["inspect", "groups", "no-such-group"], 1, "has no group 'no-such-group'"),
        (["inspect", "groups", "--watch", "1"], 2, "--watch is for a terminal"),
        (["inspect", "producers", "no-such-topic"], 1, "no topic 'no-such-topic'"),
        (["inspect", "topic", "a:b"], 2, "TOPIC:PARTITION"),
        (["inspect", "topic", "a", "--records"], 2, "TOPIC:PARTITION"),
        (["inspect", "transactions", "no-such-id"], 1, "no-such-id"),
        (["inspect", "transactions", "--end", "a:0"], 2, "--producer-id"),
        (["inspect", "transactions", "--force"], 2, "--end"),
        (["inspect", "ledger", "--topic", "no-such-topic"], 1, "no topic 'no-such-topic'"),
        (["tail", "no-such-topic"], 1, "no topic 'no-such-topic'"),
        (["tail", "a", "--from", "yesterday"], 2, "earliest"),
        (["produce", "no-such-topic", "--header", "x"], 2, "NAME=VALUE"),
    ],
)
def test_an_expected_error_is_one_sentence_and_an_exit_code(
    run: Run, arguments: list[str], status: int, said: str
) -> None:
    """1 if the cluster refused or did not answer, 2 for wrong use; nothing on standard output."""
    if arguments[:2] == ["tail", "a"]:
        run("topics", "create", "a")

    result = run(*arguments, input=b"x\n")

    assert (result.exit_code, result.stdout) == (status, "")
    assert said in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_user_without_rights_is_told_what_is_missing() -> None:
    """One sentence; what the user may see is shown all the same."""
    config = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}
    with Broker(config={**config, "super.users": "User:admin"}, fsync="never") as broker:
        for arguments in (["inspect", "groups"], ["inspect", "transactions"], ["topics", "list"]):
            result = CliRunner().invoke(app, [*arguments, "--bootstrap", broker.bootstrap])
            assert result.exit_code == 0, result.output
        result = CliRunner().invoke(app, ["topics", "create", "x", "--bootstrap", broker.bootstrap])
        assert (result.exit_code, "may not" in result.stderr) == (1, True)


def test_a_topic_that_may_not_be_read_hides_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two partitions are held back. Of the closed one it is said that, and why its holder cannot be told."""
    config = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with Broker(config=config, fsync="never") as broker:
        monkeypatch.setenv("SEMEL_BOOTSTRAP", broker.bootstrap)
        settings = {"bootstrap.servers": broker.bootstrap}
        with semel.Admin(settings) as admin:
            admin.create_topics("closed", "shut", partitions=1)
        with semel.Producer({**settings, "transactional.id": "writer"}) as producer:
            producer.begin()
            producer.send("closed", b"x")
            producer.send("shut", b"x")
            producer.flush()
            grant_describe(broker.bootstrap, "closed")

            shown = CliRunner().invoke(app, ["inspect", "transactions", "--json"])
            refused = CliRunner().invoke(app, ["tail", "closed"])

            assert shown.exit_code == 0, shown.output
            held = {one["topic"]: one for one in json.loads(shown.stdout)["held"]}
            assert held["shut"]["holder"]["standing"] == "alive"
            assert (held["closed"]["holder"], "may not use" in held["closed"]["trouble"]) == (None, True)
            assert "may not use" in CliRunner().invoke(app, ["inspect", "transactions"]).stdout
            assert (refused.exit_code, refused.stdout, "may not use" in refused.stderr) == (1, "", True)
            producer.abort()


def grant_describe(bootstrap: str, topic: str) -> None:
    """To everybody, and so nobody may read it any more; writing goes on for those who write."""
    principals = [("User:ANONYMOUS", AclOperation.DESCRIBE), ("User:ANONYMOUS", AclOperation.WRITE)]
    bindings = [
        AclBinding(
            *(ResourceType.TOPIC, topic, ResourcePatternType.LITERAL),
            *(principal, "*", operation, AclPermissionType.ALLOW),
        )
        for principal, operation in principals
    ]
    client = AdminClient({"bootstrap.servers": bootstrap})
    for done in client.create_acls(bindings).values():
        done.result(30)


def test_settings_come_from_profile_file_environment_and_flags(
    semel_broker: Broker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A flag wins over the environment, that over what it names; settings of consumers in a file mean nothing here."""
    from semel.cli.connecting import client_settings

    profiles = tmp_path / "semel" / "clusters.toml"
    profiles.parent.mkdir()
    profiles.write_text(
        '[prod]\nbootstrap.servers = "prod:1"\nclient.id = "me"\n[test]\n"metadata.broker.list" = "test:1"\n'
    )
    properties = tmp_path / "client.properties"
    properties.write_text("# ours\nbootstrap.servers = file:1,\\\nfile:2\nenable.auto.commit: true\nacks=1\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SEMEL_BOOTSTRAP", raising=False)
    name = "bootstrap.servers"

    assert client_settings(None, "prod", None, None)[name] == "prod:1"
    assert client_settings(None, "test", None, None)[name] == "test:1"
    from_file = client_settings(None, "prod", str(properties), None)
    assert (from_file[name], from_file["client.id"], "acks" in from_file) == ("file:1,file:2", "me", False)
    assert client_settings(None, None, str(properties), None, is_producer=True)["acks"] == "1"
    monkeypatch.setenv("SEMEL_PROFILE", "prod")
    monkeypatch.setenv("SEMEL_KAFKA_CLIENT_ID", "from the environment")
    assert client_settings(None, None, None, None)["client.id"] == "from the environment"
    monkeypatch.setenv("SEMEL_BOOTSTRAP", "environment:1")
    assert client_settings(None, None, None, None)[name] == "environment:1"
    assert client_settings(None, "test", None, None)[name] == "test:1", "a flag names the cluster"
    assert client_settings("flag:1", "test", None, ["client.id=flag"])["client.id"] == "flag"
    result = CliRunner().invoke(app, ["topics", "list", "--bootstrap", semel_broker.bootstrap])
    assert result.exit_code == 0


def test_output_into_a_program_that_stops_reading_ends_quietly(run: Run, semel_broker: Broker) -> None:
    """Status 141, as of any program that is ended by a broken pipe, and nothing on standard error."""
    run("topics", "create", "piped")
    run("produce", "piped", input=b"".join(b"%d\n" % number for number in range(20_000)))
    command = [*SEMEL, "tail", "piped", "--from", "earliest", "--json", "--bootstrap", semel_broker.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        assert json.loads(tail.stdout.readline())["value"] == "0"
        tail.stdout.close()
        assert tail.wait(180) == 141
        assert tail.stderr.read() == b""


def test_ctrl_c_ends_a_tail_that_follows(run: Run, semel_broker: Broker) -> None:
    """Status 130, after it has shown what came while it ran."""
    run("topics", "create", "followed")
    command = [*SEMEL, "tail", "followed", "--follow", "--from", "earliest", "--bootstrap", semel_broker.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        assert tail.stderr is not None
        run("produce", "followed", input=b"first\n")
        assert b"first" in tail.stdout.readline()
        run("produce", "followed", "--transaction", input=b"second\n")
        assert b"second" in tail.stdout.readline()
        tail.send_signal(signal.SIGINT)
        assert tail.wait(180) == 130
        assert tail.stderr.read() == b""


def test_watch_shows_it_again_on_a_terminal(run: Run, semel_broker: Broker) -> None:
    """On a terminal of its own; Ctrl-C ends it."""
    import pty

    run("topics", "create", "watched")
    leader, follower = pty.openpty()
    command = [*SEMEL, "inspect", "topic", "watched", "--watch", "0.2", "--bootstrap", semel_broker.bootstrap]
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower) as watching:
        os.close(follower)
        shown, deadline = b"", time.monotonic() + 180
        while shown.count(b"Ctrl-C ends it") < 3:
            assert time.monotonic() < deadline, shown
            shown += os.read(leader, 65_536)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(180) == 130
    os.close(leader)
    assert b"PARTITION" in shown


def test_help_teaches_with_examples_and_exit_codes() -> None:
    """Each command shows how it is called, and what its exit codes mean."""
    commands = [
        *(["inspect", name] for name in ("transactions", "producers", "groups", "topic", "ledger")),
        *(["topics", name] for name in ("list", "create", "describe", "delete")),
        ["produce"],
        ["tail"],
    ]
    for command in commands:
        shown = " ".join(CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).output.split())
        assert f"semel {' '.join(command)}" in shown.replace("Usage: semel", "", 1), command
        assert "130 after Ctrl-C" in shown
        assert "--profile" in shown
