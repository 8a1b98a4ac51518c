"""What a relay refuses, before it reads a row or fences another one, with the right way in the message."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from relay_scene import Outbox, broker, in_postgres, in_sqlite, outbox, server

import semel
from semel.bridges.relay.progress import RelayProgress, decide_start
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres

__all__ = ["broker", "outbox", "server"]

PLAIN = "id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text, key text, value text"
XID = "semel_xid xid8 NOT NULL DEFAULT pg_current_xact_id()"

TABLES = [
    (f"CREATE TABLE outbox ({PLAIN})", 'ADD COLUMN "semel_xid" xid8 NOT NULL DEFAULT pg_current_xact_id()'),
    (f"CREATE TABLE outbox ({PLAIN}, semel_xid bigint)", "is bigint and not xid8"),
    (f"CREATE TABLE outbox ({PLAIN}, semel_xid xid8 DEFAULT pg_current_xact_id())", "must be NOT NULL"),
    (f"CREATE TABLE outbox ({PLAIN}, semel_xid xid8 NOT NULL)", "SET DEFAULT pg_current_xact_id()"),
    (f"CREATE TABLE outbox (id uuid PRIMARY KEY, topic text, value text, {XID})", "ADD COLUMN seq bigint GENERATED"),
    (f"CREATE TABLE outbox (id bigint NOT NULL, topic text, value text, {XID})", "ADD PRIMARY KEY"),
    (f"CREATE TABLE outbox (topic text, value text, {XID})", "no column 'id'; it has topic, value"),
    (f"CREATE TABLE outbox (id bigserial PRIMARY KEY, value text, {XID})", "no column 'topic'"),
    (f"CREATE TABLE outbox (id bigserial PRIMARY KEY, topic text, {XID})", "no column 'value'"),
    (f"CREATE UNLOGGED TABLE outbox ({PLAIN}, {XID})", "SET LOGGED"),
    ("CREATE VIEW outbox AS SELECT 1 AS id", "is not an ordinary or partitioned table"),
    (
        "CREATE TABLE outbox (id bigint GENERATED ALWAYS AS IDENTITY (CACHE 20) PRIMARY KEY, topic text, value text, "
        f"{XID})",
        "ALTER SEQUENCE outbox_id_seq CACHE 1",
    ),
    (
        f"CREATE TABLE outbox (id bigint, topic text, value text, {XID}, PRIMARY KEY (id)) PARTITION BY RANGE (id); "
        "CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES FROM (0) TO (1000); "
        "ALTER TABLE outbox_1 ALTER COLUMN semel_xid SET DEFAULT '5'",
        "in every partition too",
    ),
]


@pytest.mark.parametrize(("statement", "said"), TABLES, ids=[str(number) for number in range(len(TABLES))])
def test_a_table_in_which_rows_could_be_lost_is_refused(
    server: Postgres, broker: EmbeddedBroker, statement: str, said: str
) -> None:
    """Each message has the statement to run, or the columns that there are."""
    outbox = in_postgres(server, broker)
    outbox.do(*statement.split("; "))
    with pytest.raises(semel.ConfigError, match="Nothing was relayed") as refused:
        outbox.relay()
    assert said in str(refused.value)


def test_what_the_message_says_makes_the_table_usable(server: Postgres, broker: EmbeddedBroker) -> None:
    """A table of the user's own, with rows: the ALTER TABLE in the message is enough, and all rows are relayed."""
    outbox = in_postgres(server, broker)
    outbox.do(f"CREATE TABLE outbox ({PLAIN})")
    outbox.write(1, 5)
    with pytest.raises(semel.ConfigError) as refused:
        outbox.relay()
    outbox.do(*str(refused.value).partition("Run: ")[2].split("; "))
    outbox.write(6, 9)
    assert outbox.relay().rows == 9
    assert outbox.has_each_once(9)


def test_a_missing_table_is_refused_with_the_sql_that_makes_it(
    server: Postgres, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """For both databases; a SQLite file that is not there is not made."""
    in_file, in_server = in_sqlite(tmp_path, broker), in_postgres(server, broker)
    with pytest.raises(semel.ConfigError, match="There is no SQLite file"):
        in_file.relay()
    assert not (tmp_path / "shop.db").exists()
    in_file.do("CREATE TABLE other (id INTEGER)")
    for one in (in_file, in_server):
        with pytest.raises(semel.ConfigError, match="There is no table 'outbox'") as refused:
            one.relay()
        one.do(str(refused.value).partition("Create it: ")[2])
        one.write(1, 3)
        assert one.relay().rows == 3


def test_sqlite_ids_that_can_be_given_out_again_are_refused(tmp_path: Path, broker: EmbeddedBroker) -> None:
    """Without AUTOINCREMENT, and with it on another column than the one to read."""
    outbox = in_sqlite(tmp_path, broker)
    outbox.do(
        "CREATE TABLE outbox (id INTEGER PRIMARY KEY, topic TEXT, value TEXT)",
        "CREATE TABLE other (n INTEGER PRIMARY KEY AUTOINCREMENT, id INTEGER UNIQUE, topic TEXT, value TEXT)",
    )
    for table in ("outbox", "other"):
        with pytest.raises(semel.ConfigError, match="is not INTEGER PRIMARY KEY AUTOINCREMENT"):
            outbox.relay(table=table)
    outbox.do(f"INSERT INTO other (topic, value) VALUES ('{outbox.topic}', '1')")
    assert outbox.relay(table="other", id="n").rows == 1


def test_missing_rights_and_wrong_logins_are_refused_at_once(broker: EmbeddedBroker) -> None:
    """SELECT for reading, DELETE for clean-up, row-level security, a wrong password."""
    with Postgres(password="secret") as server:
        outbox = Outbox("postgres", server.uri, broker.bootstrap)
        outbox.make_table()
        outbox.do("CREATE ROLE app LOGIN")
        limited = Outbox("postgres", server.uri.replace("postgres@", "app@"), broker.bootstrap)
        with pytest.raises(semel.DatabaseError, match='Run: GRANT SELECT ON "outbox" TO app'):
            limited.relay()
        outbox.do("GRANT SELECT ON outbox TO app")
        outbox.write(1, 3)
        limited.topic = outbox.topic
        assert limited.relay().rows == 3
        with pytest.raises(semel.DatabaseError, match='Run: GRANT DELETE ON "outbox" TO app'):
            limited.relay(delete=True)
        outbox.do("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
        with pytest.raises(semel.ConfigError, match="Row-level security hides rows"):
            limited.relay()
        began = time.monotonic()
        wrong = Outbox("postgres", server.tcp_uri.replace(":secret@", ":guess@"), broker.bootstrap)
        with pytest.raises(semel.AuthenticationFailed, match="refused the login") as refused:
            wrong.relay()
        assert time.monotonic() - began < 10
        assert "guess" not in str(refused.value)


def test_a_standby_is_refused(server: Postgres, broker: EmbeddedBroker) -> None:
    """On a standby the snapshot's list of open transactions is empty, and rows would be lost."""
    outbox = in_postgres(server, broker)
    outbox.make_table()
    outbox.do(
        "CREATE FUNCTION public.pg_is_in_recovery() RETURNS boolean LANGUAGE sql AS 'SELECT true'",
        "ALTER DATABASE "
        + str(outbox.ask("SELECT current_database()")[0][0])
        + " SET search_path = public, pg_catalog",
    )
    with pytest.raises(semel.ConfigError, match="is a standby, and a relay needs the primary"):
        outbox.relay()


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "cannot name a relay"),
    ({"name": "a/b"}, "without '/'"),
    ({"topic": ""}, "names no topic"),
    ({"topic": "a{"}, "cannot be read"),
    ({"topic": "{topic!r}"}, "in braces stands the name of a column"),
    ({"topic": "{kind}"}, "has no column 'kind'"),
    ({"key": "customer"}, "has no column 'customer'"),
    ({"resume": "yes"}, "write 'continue' or 'all'"),
    ({"transactional_id": "x"}, "use name="),
    ({"bootstrp": "x"}, "did you mean bootstrap?"),
    ({"transaction_rows_max": 0}, "must be positive"),
    ({"topic": "a", "dead_letter": "a"}, "need a topic"),
]


@pytest.mark.parametrize(("wrong", "said"), OPTIONS, ids=[str(number) for number in range(len(OPTIONS))])
def test_wrong_options_are_refused(outbox: Outbox, wrong: dict[str, Any], said: str) -> None:
    """Misspelt, contradictory, or about columns that are not there."""
    with pytest.raises(semel.ConfigError) as refused:
        outbox.relay(**wrong)
    assert said in str(refused.value)


def test_addresses_of_no_database_are_refused() -> None:
    """SQLAlchemy's and Java's URLs, other databases, and connections."""
    for address in ("mysql://a/b", "postgresql+psycopg://a/b", "sqlite:///shop.db", "jdbc:postgresql://a/b", 5):
        with pytest.raises(semel.ConfigError):
            semel.relay(address, name="a", bootstrap="127.0.0.1:1")  # type: ignore[arg-type]


def test_missing_topics_are_refused_before_another_relay_is_fenced(outbox: Outbox) -> None:
    """A fixed topic, and the one for dead letters."""
    with pytest.raises(semel.UnknownTopic, match="Events cannot be written"):
        outbox.relay(topic="no-such-topic")
    with pytest.raises(semel.UnknownTopic, match="Dead letters cannot be written"):
        outbox.relay(dead_letter="no-such-topic")
    with semel.Admin({"bootstrap.servers": outbox.bootstrap}) as admin:
        names = [one.transactional_id for one in admin.list_transactions()]
    assert f"/relay/{outbox.name}" not in names


def test_another_table_under_the_same_name_is_refused(outbox: Outbox) -> None:
    """Its rows would be taken for relayed ones; `continue` is for a table that was renamed."""
    outbox.write(1, 3)
    outbox.relay()
    outbox.do("ALTER TABLE outbox RENAME TO events")
    with pytest.raises(semel.ConfigError, match=r'another table .*renamed, pass resume="continue"'):
        outbox.relay(table="events")
    assert outbox.relay(table="events", resume="continue").rows == 0
    assert outbox.relay(table="events").rows == 0
    assert outbox.has_each_once(3)


def test_a_restored_dump_is_recognised_and_what_the_message_says_repeats_nothing(broker: EmbeddedBroker) -> None:
    """Another server counts transactions from the beginning. Rows carry their old ids, which say what was relayed."""
    with Postgres() as old, Postgres() as new:
        before = Outbox("postgres", old.uri, broker.bootstrap)
        before.do("SELECT pg_current_xact_id()", *["SELECT pg_current_xact_id()"] * 30)
        before.make_table()
        before.write(1, 20)
        before.relay(transaction_rows_max=8)
        before.write(21, 30)
        after = Outbox("postgres", new.uri, broker.bootstrap)
        after.name, after.topic = before.name, before.topic
        after.make_table()
        with psycopg.connect(old.uri) as source, psycopg.connect(new.uri) as target:
            rows = source.execute(b"SELECT id, topic, key, value, semel_xid::text FROM outbox ORDER BY id").fetchall()
            for row in rows:
                target.execute(
                    b"INSERT INTO outbox (id, topic, key, value, semel_xid) OVERRIDING SYSTEM VALUE "
                    b"VALUES (%s, %s, %s, %s, %s::xid8)",
                    row,
                )
        with pytest.raises(semel.ConfigError, match="another server") as refused:
            after.relay()
        said = str(refused.value)
        assert 'pass resume="all"' in said
        delete = "DELETE FROM" + said.partition("DELETE FROM")[2].partition(";")[0]
        update = "UPDATE" + said.partition("UPDATE")[2].partition(";")[0]
        after.do(delete, update, "SELECT setval('outbox_id_seq', 30)")
        assert after.relay(resume="all").rows == 10
        after.write(31, 40)
        assert after.relay(resume="all").rows == 10  # it may stay in a start script
        assert after.has_each_once(40)


def test_rows_with_ids_of_the_future_are_refused(server: Postgres, broker: EmbeddedBroker) -> None:
    """Rows that were copied from another server, into a table that is relayed already."""
    outbox = in_postgres(server, broker)
    outbox.make_table()
    outbox.relay()
    outbox.do(f"INSERT INTO outbox (topic, key, value, semel_xid) VALUES ('{outbox.topic}', 'k', '1', '9999999')")
    with pytest.raises(
        semel.ConfigError, match="has transaction id 9999999, which this server has not given out"
    ) as no:
        outbox.relay()
    outbox.do("UPDATE" + str(no.value).partition("UPDATE")[2].partition(";")[0])
    assert outbox.relay().rows == 1


def test_a_file_that_was_put_back_or_made_again_is_recognised(tmp_path: Path, broker: EmbeddedBroker) -> None:
    """Its ids begin again, so its rows would be taken for relayed ones."""
    outbox = in_sqlite(tmp_path, broker)
    outbox.make_table()
    outbox.write(1, 5)
    outbox.relay()
    backup = (tmp_path / "shop.db").read_bytes()
    outbox.write(6, 9)
    outbox.relay()
    (tmp_path / "shop.db").write_bytes(backup)
    with pytest.raises(semel.ConfigError, match="put back to an earlier state"):
        outbox.relay()
    with pytest.raises(semel.ConfigError, match="put back to an earlier state"):
        outbox.relay(resume="continue")
    (tmp_path / "shop.db").unlink()
    outbox.make_table()
    outbox.write(10, 30)
    with pytest.raises(semel.ConfigError, match="another file, or one that was created again"):
        outbox.relay()
    assert outbox.relay(resume="all").rows == 21
    assert sorted(outbox.numbers()) == list(range(1, 31))


def test_a_server_that_was_promoted_goes_on_only_when_told() -> None:
    """The pure decision: the timeline has changed, ids go on if the standby had every commit."""
    here = {"kind": "postgres", "system": "7", "timeline": 1, "database": 5, "table": "public.outbox"}
    there = {**here, "timeline": 2}
    progress = RelayProgress(here, {"relayed": "5:6:", "until": None, "after": None})

    def decide(identity: dict[str, Any], resume: Any = None, is_behind: bool = False) -> Any:
        return decide_start("r", progress, identity, resume, is_behind=is_behind, advice=lambda position: "advice.")

    assert decide(here) == progress.position
    with pytest.raises(semel.ConfigError, match=r'promoted, or restored .*pass resume="continue".*advice'):
        decide(there)
    assert decide(there, "continue") == progress.position
    assert decide(there, "all") is None
    with pytest.raises(semel.ConfigError):
        decide(there, "continue", is_behind=True)
    with pytest.raises(semel.ConfigError, match="another kind of database"):
        decide({"kind": "sqlite", "home": "x", "table": "t"}, "continue")


@pytest.mark.parametrize("value", [b"garbage", b"[1]", b"7", b"\xff"])
def test_progress_that_something_else_has_written_is_told_in_a_sentence(value: bytes) -> None:
    with pytest.raises(semel.ConfigError, match="cannot be read"):
        RelayProgress.decode(value)
