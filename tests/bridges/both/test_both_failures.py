"""Lost connections, lost brokers, recovery by hand, and what is refused before anything is written."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from both_processes import live
from both_scene import PARTITIONS, Shop

import semel
from semel.bridges.both import kafka_side
from semel.bridges.both.both import open_store
from semel.bridges.both.sqlite_store import SqliteStore
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres
from semel.testing.proxy import Cut, Direction, KafkaProxy, Passage
from semel.wire import Api

KILLED = -9


@pytest.fixture(scope="module")
def quick_broker() -> Any:
    with EmbeddedBroker(fsync="never") as broker:
        yield broker


@pytest.fixture
def sqlite_shop(tmp_path: Path, quick_broker: EmbeddedBroker) -> Shop:
    shop = Shop(str(tmp_path / "shop.db"), quick_broker.bootstrap)
    shop.set_up()
    return shop


# -- recovery by hand ----------------------------------------------------------------------------------------------


def test_by_hand_an_open_transaction_is_committed_and_an_aborted_one_sent_again(shop: Shop) -> None:
    """Two dead programs: one's transaction is still open, the other's was aborted by a new producer of its name."""
    other = Shop(shop.address, shop.bootstrap)
    with semel.Admin({"bootstrap.servers": shop.bootstrap}) as admin:
        admin.create_topics(other.topic, partitions=PARTITIONS)
    assert live(shop, 2, "both_database_committed:2") == [KILLED]
    assert live(other, 12, "both_database_committed:2", first=11) == [KILLED]
    other.producer().close()  # aborts what is open
    assert sorted(set(shop.events())) == [1]
    with closing(shop.connect()) as connection:
        done = semel.recover_both(connection, bootstrap_servers=shop.bootstrap)
        assert {one.name: one.outcome for one in done} == {shop.name: "committed", other.name: "sent again"}
        assert semel.recover_both(connection, bootstrap_servers=shop.bootstrap) == []
    shop.check([1, 2])
    other.check([11, 12])


def test_a_program_that_still_runs_is_not_disturbed_by_a_recovery_by_hand(shop: Shop) -> None:
    """There is nothing to finish between its blocks."""
    with shop.producer() as producer, closing(shop.connect()) as connection, closing(shop.connect()) as other:
        for number in range(1, 4):
            shop.order(connection, producer, number)
            assert semel.recover_both(other, bootstrap_servers=shop.bootstrap, name=shop.name) == []
    shop.check([1, 2, 3])


def test_where_the_end_was_deleted_nothing_is_done_without_the_users_word(sqlite_shop: Shop) -> None:
    """Retention took the marker, and the coordinator has moved on: neither can be proven."""
    shop = sqlite_shop
    assert live(shop, 2, "both_database_committed:2") == [KILLED]
    for _ in range(2):
        shop.producer().close()
    with semel.Admin({"bootstrap.servers": shop.bootstrap}) as admin:
        admin.delete_records({(shop.topic, partition): -1 for partition in range(PARTITIONS)})
    with closing(shop.connect()) as connection:
        with pytest.raises(semel.SemelError, match="cannot be told any more"):
            semel.recover_both(connection, bootstrap_servers=shop.bootstrap)
        assert shop.leftovers()[0] == 1
        [done] = semel.recover_both(connection, bootstrap_servers=shop.bootstrap, lost="aborted")
    assert done.outcome == "sent again"
    assert shop.leftovers() == (0, 0)
    assert shop.events() == [2, 2]


def test_a_topic_that_was_created_again_is_no_proof_of_anything(
    sqlite_shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its offsets are other records', and no marker will ever come: it says so, and leaves it to the user's word."""
    shop = sqlite_shop
    monkeypatch.setattr(kafka_side, "_MARKER_MS", 500)  # twice this long it waits for a marker that may be under way
    assert live(shop, 2, "both_database_committed:2") == [KILLED]
    for _ in range(2):
        shop.producer().close()
    with (
        semel.Admin({"bootstrap.servers": shop.bootstrap}) as admin,
        semel.Producer(bootstrap_servers=shop.bootstrap) as other,
    ):
        admin.delete_topics(shop.topic)
        admin.create_topics(shop.topic, partitions=PARTITIONS)
        for number in range(30):
            other.send(shop.topic, str(number), partition=number % PARTITIONS)
    with closing(shop.connect()) as connection, pytest.raises(semel.SemelError, match="cannot be told any more"):
        semel.recover_both(connection, bootstrap_servers=shop.bootstrap)
    assert shop.leftovers()[0] == 1


def test_a_decision_about_another_cluster_is_refused(sqlite_shop: Shop) -> None:
    """A program that was pointed at a new cluster must not take it for the one that has the records."""
    shop = sqlite_shop
    assert live(shop, 2, "both_database_committed:2") == [KILLED]
    with EmbeddedBroker(fsync="never") as elsewhere, closing(shop.connect()) as connection:
        with pytest.raises(semel.ConfigError, match="decision about the Kafka cluster"):
            semel.recover_both(connection, bootstrap_servers=elsewhere.bootstrap)
        with (
            pytest.raises(semel.ConfigError, match="decision about the Kafka cluster"),
            semel.Producer(bootstrap_servers=elsewhere.bootstrap, transactional_id=shop.name) as producer,
        ):
            shop.order(connection, producer, 3)
    assert live(shop, 3, "") == [0]
    shop.check([1, 2, 3])


# -- lost connections ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_carried_out", [True, False])
def test_a_commit_of_postgres_whose_answer_is_lost_is_looked_up(
    server: Postgres, broker: EmbeddedBroker, is_carried_out: bool
) -> None:
    """By a new connection, behind the row's lock: both sides, or neither, and the caller is told which."""
    name = f"shop_{threading.get_native_id()}_{broker.bootstrap.rpartition(':')[2]}_{int(is_carried_out)}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    shop = Shop(server.uri.replace("/postgres?", f"/{name}?"), broker.bootstrap)
    shop.set_up()

    def end_session(pid: int) -> None:
        with psycopg.connect(server.uri, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))

    class Lossy(psycopg.Connection[Any]):
        losing = False

        def commit(self) -> None:
            decided = self.execute("SELECT count(*) FROM semel_both WHERE decision IS NOT NULL").fetchone()
            if self.losing and decided == (1,):
                if is_carried_out:
                    super().commit()
                end_session(self.info.backend_pid)
                self.execute("SELECT 1")  # what psycopg raises when an answer does not come
            super().commit()

    with shop.producer() as producer:
        with Lossy.connect(shop.address) as connection:
            shop.order(connection, producer, 1)
            connection.losing = True
            if is_carried_out:
                shop.order(connection, producer, 2)
            else:
                with pytest.raises(semel.TransactionAborted, match="did not carry it out"):
                    shop.order(connection, producer, 2)
        with closing(shop.connect()) as connection:
            shop.order(connection, producer, 3)
    shop.check([1, 2, 3] if is_carried_out else [1, 3])


def test_if_nobody_can_tell_whether_postgres_has_committed_the_next_block_finds_out(broker: EmbeddedBroker) -> None:
    """The server goes down in the commit. CommitUnknown now, and both sides agree as soon as it is back."""
    with Postgres() as own:
        shop = Shop(own.uri, broker.bootstrap)
        shop.set_up()

        class Dying(psycopg.Connection[Any]):
            def commit(self) -> None:
                rows = self.execute("SELECT count(*) FROM semel_both WHERE decision IS NOT NULL").fetchone()
                if rows == (1,) and self.dies:
                    super().commit()
                    own.stop_at_once()
                    self.execute("SELECT 1")
                super().commit()

            dies = False

        with shop.producer() as producer:
            with Dying.connect(shop.address) as connection:
                shop.order(connection, producer, 1)
                connection.dies = True
                with pytest.raises(semel.CommitUnknown, match="Look at your own rows"):
                    shop.order(connection, producer, 2)
            own.start()
            with closing(shop.connect()) as connection:
                shop.order(connection, producer, 3)
        shop.check([1, 2, 3])


def test_a_broker_that_goes_down_after_the_database_has_committed_gets_it_later(sqlite_shop: Shop) -> None:
    """CommitPending says so, and not to run the block again; the next block of the name finishes it first."""
    shop = sqlite_shop
    with semel.Broker() as broker:
        shop = Shop(shop.address, broker.bootstrap)
        with semel.Admin({"bootstrap.servers": broker.bootstrap}) as admin:
            admin.create_topics(shop.topic, partitions=PARTITIONS)

        class Killing(SqliteStore):
            def commit(self) -> None:
                is_decided = self._execute("SELECT count(*) FROM semel_both WHERE decision IS NOT NULL").rows == [(1,)]
                super().commit()
                if is_decided and order == 2:
                    broker.kill()

        order = 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("semel.bridges.both.both.SqliteStore", Killing)
            with shop.producer(default_api_timeout_ms=1_000) as producer, closing(shop.connect()) as connection:
                shop.order(connection, producer, order)
                order = 2
                with pytest.raises(semel.CommitPending, match="do not run the block again"):
                    shop.order(connection, producer, order)
                broker.start()
                order = 3
                shop.order(connection, producer, order)
        assert shop.rows() == [1, 2, 3]
        shop.check([1, 2, 3])


def test_an_answer_to_the_end_that_is_lost_is_looked_up(sqlite_shop: Shop) -> None:
    """The connection is cut while EndTxn is under way; the block ends as if nothing had happened."""
    shop = sqlite_shop
    ends: list[int] = []

    def cut_every_other_end(passage: Passage) -> Cut | None:
        if passage.api_key != Api.END_TXN or passage.direction is not Direction.REQUEST:
            return None
        ends.append(passage.index)
        return (Cut.BEFORE, None, Cut.AFTER, None)[len(ends) % 4]

    with KafkaProxy(shop.bootstrap) as proxy:
        proxy.decide = cut_every_other_end
        through = Shop(shop.address, proxy.bootstrap, shop.name, shop.topic)
        with through.producer(reconnect_backoff_ms=10) as producer, closing(shop.connect()) as connection:
            for number in range(1, 6):
                shop.order(connection, producer, number)
    assert len(ends) > 5
    shop.check([1, 2, 3, 4, 5])


def test_a_pipeline_around_a_block_is_refused(server: Postgres, quick_broker: EmbeddedBroker) -> None:
    """There commit() returns before the server has committed. Inside of the block a pipeline may be used."""
    name = f"pipeline_{quick_broker.bootstrap.rpartition(':')[2]}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    shop = Shop(server.uri.replace("/postgres?", f"/{name}?"), quick_broker.bootstrap)
    shop.set_up()

    def use_pipeline(_: Any) -> None:
        with connection.pipeline():
            connection.execute("SELECT 1")

    with shop.producer() as producer, closing(shop.connect()) as connection:
        with connection.pipeline(), pytest.raises(semel.InvalidState, match="pipeline mode"):
            shop.order(connection, producer, 1)
        connection.rollback()
        shop.order(connection, producer, 2, use_pipeline)
    shop.check([2])


# -- refused before anything is written -----------------------------------------------------------------------------


def test_a_connection_in_a_transaction_is_refused(shop: Shop) -> None:
    """Whose end would it be? Nothing is written, and the message says what to do."""
    with shop.producer() as producer, closing(shop.connect()) as connection:
        connection.execute(shop.insert, (1, shop.topic))
        with pytest.raises(semel.InvalidState, match="has a transaction open already"):
            shop.order(connection, producer, 2)
        connection.rollback()
        shop.order(connection, producer, 2)
    shop.check([2])


def test_blocks_cannot_be_nested_and_belong_to_one_thread(shop: Shop) -> None:
    """Nested with the same producer, a producer's own transaction, a use after the end, a use in another thread."""
    with shop.producer() as producer, closing(shop.connect()) as connection, closing(shop.connect()) as other:
        with pytest.raises(semel.InvalidState, match="cannot be nested"):
            shop.order(connection, producer, 1, lambda t: shop.order(other, producer, 2))
        producer.begin()
        with pytest.raises(semel.InvalidState, match="has a transaction open"):
            shop.order(connection, producer, 1)
        producer.abort()
        with semel.both(connection, producer) as t:
            errors: list[BaseException] = []

            def elsewhere() -> None:
                try:
                    t.send(shop.topic, "1")
                except semel.InvalidState as error:
                    errors.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            shop.place(connection, t, 3)
        assert "belongs to the thread" in str(errors[0])
        with pytest.raises(semel.InvalidState, match="is over"):
            t.send(shop.topic, "1")
    shop.check([3])


def test_what_cannot_keep_the_promise_is_refused(sqlite_shop: Shop, server: Postgres) -> None:
    """A producer without an id, databases in memory, settings that lose commits, connections of another kind."""
    shop = sqlite_shop
    with closing(shop.connect()) as connection, closing(sqlite3.connect(":memory:")) as memory:
        with (
            semel.Producer(bootstrap_servers=shop.bootstrap) as plain,
            pytest.raises(semel.ConfigError, match=r"needs a producer with a transactional\.id"),
        ):
            shop.order(connection, plain, 1)
        with shop.producer() as producer:
            with pytest.raises(semel.ConfigError, match="needs a database in a file"):
                shop.order(memory, producer, 1)
            connection.execute("PRAGMA synchronous = NORMAL")
            with pytest.raises(semel.ConfigError, match="PRAGMA synchronous=FULL"):
                shop.order(connection, producer, 1)
            with pytest.raises(semel.ConfigError, match="cannot use a object"):
                shop.order(object(), producer, 1)
    with pytest.raises(semel.ConfigError, match=r"asyncio\.to_thread"):
        open_store(object.__new__(psycopg.AsyncConnection))
    assert shop.rows() == []


def test_a_session_of_postgres_that_need_not_be_durable_is_made_so_for_the_block(
    server: Postgres, broker: EmbeddedBroker
) -> None:
    """With synchronous_commit=off a crash of the server could undo what Kafka has. The session's setting stays."""
    seen: list[Any] = []
    name = f"durable_{broker.bootstrap.rpartition(':')[2]}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    shop = Shop(server.uri.replace("/postgres?", f"/{name}?"), broker.bootstrap)
    shop.set_up()

    class Watched(psycopg.Connection[Any]):
        def commit(self) -> None:
            if self.execute("SELECT count(*) FROM semel_both WHERE decision IS NOT NULL").fetchone() == (1,):
                seen.append(self.execute("SHOW synchronous_commit").fetchone())
            super().commit()

    with shop.producer() as producer, Watched.connect(shop.address) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.commit()
        shop.order(connection, producer, 1)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)
    assert seen == [("on",)]
    shop.check([1])
