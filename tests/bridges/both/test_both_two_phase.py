"""Both or neither where the cluster has two-phase commit (KIP-939): no timeout, and nothing is sent again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from both_processes import RESENDING, every_point, live, stopped
from both_scene import Shop, shops

import semel
from semel.testing.embedded import EmbeddedBroker
from semel.testing.postgres import Postgres


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config={"transaction.two.phase.commit.enable": "true"}) as broker:
        yield broker


@pytest.fixture(params=[0, 1], ids=["sqlite", "postgres"])
def either_shop(request: pytest.FixtureRequest, tmp_path: Path, broker: EmbeddedBroker, server: Postgres) -> Shop:
    made = list(shops(tmp_path, broker.bootstrap, server))[request.param]
    made.set_up()
    return made


@pytest.fixture
def shop(tmp_path: Path, broker: EmbeddedBroker) -> Shop:
    """In SQLite, where Kafka's side alone is looked at."""
    made = Shop(str(tmp_path / "shop.db"), broker.bootstrap)
    made.set_up()
    return made


def state_of(broker: EmbeddedBroker, shop: Shop) -> tuple[str, bool]:
    found = broker.call(lambda: broker.broker.transactions.coordinator.get(shop.name))
    assert found is not None
    return found.status.title, found.is_two_phase


def records_stored(broker: EmbeddedBroker, shop: Shop) -> int:
    """All that was ever written to the topic, whatever became of it."""
    with semel.Fetcher({"bootstrap.servers": broker.bootstrap, "isolation.level": "read_uncommitted"}) as fetcher:
        fetcher.assign({(shop.topic, partition): "earliest" for partition in range(3)})
        return sum(table.num_rows for table in fetcher.read_until(fetcher.end_offsets()))


def test_both_sides_agree_though_the_program_is_killed_at_every_point(either_shop: Shop) -> None:
    """G5: the same lives as without it, but for those that can only die while they send again."""
    shop = either_shop
    points = [point for point in every_point() if point not in RESENDING]
    last = 3 * len(points)
    assert live(shop, last, *points, "") == [-signal.SIGKILL] * len(points) + [0]
    shop.check(list(range(1, last + 1)))


def test_what_was_decided_is_committed_as_it_is(shop: Shop, broker: EmbeddedBroker) -> None:
    """The next program of the name finds the transaction, and the decision that names it. Nothing is written again."""
    assert live(shop, 1, "both_database_committed") == [-signal.SIGKILL]
    assert state_of(broker, shop) == ("Ongoing", True)
    assert live(shop, 2, "") == [0]
    shop.check([1, 2])
    assert records_stored(broker, shop) == 2 * 2


def test_what_was_not_decided_is_aborted_by_the_next_program(shop: Shop, broker: EmbeddedBroker) -> None:
    """The database has rolled back, so the order is placed once more and is on both sides once."""
    assert live(shop, 1, "both_records_written") == [-signal.SIGKILL]
    assert state_of(broker, shop) == ("Ongoing", True)
    assert live(shop, 1, "") == [0]
    shop.check([1])
    assert records_stored(broker, shop) == 2 * 2


def test_a_program_that_is_held_up_between_the_two_commits_is_not_timed_out(
    shop: Shop, broker: EmbeddedBroker, tmp_path: Path
) -> None:
    """transaction.timeout.ms does not count: no deadline is there at all, so that no time needs to pass to show it."""
    with stopped(shop, 4, tmp_path, "both_database_committed:2", transaction_timeout_ms=1) as slow:
        assert state_of(broker, shop) == ("Ongoing", True)
        assert broker.call(broker.broker.transactions.coordinator.next_deadline_ms) is None
        slow.send_signal(signal.SIGCONT)
        _, said = slow.communicate(timeout=60)
    assert (slow.returncode, said) == (0, "")
    shop.check([1, 2, 3, 4])
    assert records_stored(broker, shop) == 2 * 4


def test_a_zombie_that_wakes_after_its_successor_changes_nothing(
    tmp_path: Path, broker: EmbeddedBroker, server: Postgres
) -> None:
    """What it had prepared was ended by its successor: committed if it was decided, else aborted."""
    for number, point in enumerate(("both_records_written", "both_database_committed")):
        *_, shop = shops(tmp_path, broker.bootstrap, server)
        shop.set_up()
        note = tmp_path / f"note-{number}"
        note.mkdir()
        with stopped(shop, 8, note, f"{point}:2") as zombie:
            assert live(shop, 16, "", first=11) == [0]
            expected = [1, *([] if point == "both_records_written" else [2]), *range(11, 17)]
            shop.check(expected)
            zombie.send_signal(signal.SIGCONT)
            _, said = zombie.communicate(timeout=60)
        assert zombie.returncode == 1, said
        shop.check(expected)


def test_by_hand_a_decided_transaction_is_committed_and_nobody_is_fenced(shop: Shop, broker: EmbeddedBroker) -> None:
    """Its program is gone for good. EndTxn under the decision's own identity is enough."""
    assert live(shop, 2, "both_database_committed:2") == [-signal.SIGKILL]
    with closing(shop.connect()) as connection:
        [done] = semel.recover_both(connection, bootstrap_servers=shop.bootstrap)
        assert (done.name, done.outcome) == (shop.name, "committed")
    shop.check([1, 2])
    assert records_stored(broker, shop) == 2 * 2


def test_by_hand_also_after_a_successor_has_kept_it_and_died(shop: Shop, broker: EmbeddedBroker) -> None:
    """Then EndTxn is refused under the decision's identity, and a producer of the name commits it."""
    assert live(shop, 2, "both_database_committed:2") == [-signal.SIGKILL]
    assert live(shop, 3, "both_claimed") == [-signal.SIGKILL]
    with closing(shop.connect()) as connection:
        [done] = semel.recover_both(connection, bootstrap_servers=shop.bootstrap)
        assert (done.name, done.outcome) == (shop.name, "committed")
    shop.check([1, 2])
    assert records_stored(broker, shop) == 2 * 2
