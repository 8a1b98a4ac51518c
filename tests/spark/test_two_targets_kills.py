"""One micro-batch into Kafka and into Postgres, with the driver killed between the two commits and around them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from driver_groups import run_driver
from kill_feed import Feed
from topic_contents import values

import semel
from semel.testing.postgres import Postgres

pytestmark = pytest.mark.chaos

KILLS = {
    "table": [
        "before_return:1:table-table",  # between the two commits
        "after_end_sent:1:topic-table",
        "before_return:1:topic-table",
    ],
    "topic": [
        "before_return:1:topic-topic",
        "before_commit:1:table-topic",
        "after_commit:1:table-topic",
    ],
}
"""By the one that is written first: where the driver dies, each in a batch of its own."""


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with Postgres() as started:
        yield started


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with semel.Broker() as broker:
        yield broker.bootstrap


@pytest.mark.parametrize("first", KILLS)
def test_each_of_two_targets_has_every_row_once_though_the_driver_dies_between_their_commits(
    server: Postgres, bootstrap: str, tmp_path: Path, first: str
) -> None:
    """F6: in either order. Right after such a kill the first target has one batch more than the second."""
    with semel.Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics(f"after-{first}", partitions=2)
    with psycopg.connect(server.uri) as connection:
        connection.execute(f"CREATE TABLE after_{first} (id bigint, word text)".encode())
    feed = Feed(tmp_path)
    feed.add(1)
    told = {"folder": str(tmp_path), "uri": server.uri, "bootstrap": bootstrap, "first": first}
    driver, log = Path(__file__).parent / "two_targets_driver.py", tmp_path / "driver.log"

    def in_table() -> list[int]:
        with psycopg.connect(server.uri) as connection:
            return [row[0] for row in connection.execute(f"SELECT id FROM after_{first} ORDER BY id".encode())]

    def in_topic() -> list[int]:
        return sorted(map(int, values(bootstrap, f"after-{first}")))

    for number, point in enumerate(KILLS[first]):
        feed.add(1)
        ended = run_driver(driver, told, log, kill_at=point)
        assert ended == -signal.SIGKILL, f"never got to {point}: {log.read_text()[-3000:]}"
        if number == 0:
            lengths = (len(in_table()), len(in_topic()))
            assert lengths == ((60, 0) if first == "table" else (0, 60)), "it died between the two"
    assert run_driver(driver, told, log) == 0, log.read_text()[-3000:]
    everything = sorted(row[0] for row in feed.left)
    assert in_table() == everything
    assert in_topic() == everything
