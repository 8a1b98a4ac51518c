"""What a new user writes by habit from other clients is accepted, or refused with what to write instead."""

from __future__ import annotations

import time
from typing import Any

import pytest

import semel
from semel.errors import ConfigError


@pytest.fixture
def to(semel_broker: semel.Broker) -> dict[str, object]:
    return {"bootstrap.servers": semel_broker.bootstrap}


@pytest.mark.parametrize("make", [semel.Producer, semel.Admin, semel.Fetcher])
def test_an_address_alone_is_answered_with_the_settings_to_write(make: Any) -> None:
    """Not with Python's "'str' object is not a mapping"."""
    with pytest.raises(ConfigError, match=r"bootstrap\.servers"):
        make("localhost:9092")


@pytest.mark.parametrize("make", [semel.Producer, semel.Admin, semel.Fetcher])
def test_settings_may_be_keywords(to: dict[str, object], make: Any) -> None:
    """The same for every client."""
    make(bootstrap_servers=to["bootstrap.servers"], client_id="me").close()
    with pytest.raises(ConfigError, match="is not a setting"):
        make(to, no_such_setting=1)


@pytest.mark.parametrize(
    "ask",
    [
        lambda admin: admin.list_topics(),
        lambda admin: admin.describe_topics("t"),
        lambda admin: admin.create_topics("t"),
    ],
)
def test_an_address_where_nobody_listens_is_reported_soon(ask: Any) -> None:
    """A first contact has no broker to wait for: not `default.api.timeout.ms`, which is a minute."""
    started = time.monotonic()
    with semel.Admin(bootstrap_servers="127.0.0.1:1") as admin, pytest.raises(semel.BrokerUnreachable):
        ask(admin)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("table", "advice"), [({"value": [b"1"]}, "pa.table"), ([{"value": b"1"}], "from_pylist"), (b"1", "send")]
)
def test_what_is_no_table_is_answered_with_how_to_make_one(to: dict[str, object], table: Any, advice: str) -> None:
    """`send_table` says which call of pyarrow makes a table of it, and stays usable."""
    with semel.Producer(to) as producer:
        with pytest.raises(ConfigError, match=advice):
            producer.send_table("orders", table)
        assert producer.flush() == []


def test_names_may_be_given_as_a_list(to: dict[str, object]) -> None:
    """As with other clients: a list of topics is as good as several arguments."""
    with semel.Admin(to) as admin:
        admin.create_topics(["list-a", "list-b"], partitions=2)
        assert set(admin.describe_topics(["list-a", "list-b"])) == {"list-a", "list-b"}
        admin.delete_topics(["list-a"])
        assert "list-a" not in admin.list_topics()
        with pytest.raises(ConfigError, match="text"):
            admin.create_topics({"name": "x"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "advice"),
    [("num_partitions", "partitions="), ("replication_factor", "replication="), ("topic_config", "config=")],
)
def test_an_argument_of_another_client_is_answered_with_its_name_here(
    to: dict[str, object], given: str, advice: str
) -> None:
    """A TypeError as Python's own, with the name to write."""
    with semel.Admin(to) as admin, pytest.raises(TypeError, match=advice):
        admin.create_topics("never", **{given: 1})  # pyright: ignore[reportArgumentType]


def test_the_older_of_two_producers_with_one_transactional_id_is_told_at_once(to: dict[str, object]) -> None:
    """`Fenced` says to stop this one. "Abort and begin again" would only lead to it one transaction later."""
    with semel.Admin(to) as admin:
        admin.create_topics("fenced-at-once")
    older = semel.Producer(to, transactional_id="one-id")
    with older.transaction():
        older.send("fenced-at-once", b"1")
    with semel.Producer(to, transactional_id="one-id") as newer, newer.transaction():
        newer.send("fenced-at-once", b"2")
    with pytest.raises(semel.Fenced), older.transaction():
        older.send("fenced-at-once", b"3")
    older.close()


def test_the_public_module_shows_its_public_names_only() -> None:
    """`dir(semel)` is a table of contents, and Row, which functions return, is in it."""
    shown = {name for name in dir(semel) if not name.startswith("_")}
    assert shown == {*semel.__all__, "advise", "effects", "logs", "metrics", "traces"}
    row = semel.Row("t", 0, 5, 0, b"k", b"v")
    assert row._replace(value=b"w").value == b"w"
