"""Looks at the cluster: deadlines, what is kept, and how open transactions are put on the timeline."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from web_scene import running_page

from semel.client.admin import ProducerState, TransactionDescription
from semel.client.cluster import Cluster
from semel.client.partitions import TopicPartition
from semel.client.settings import parse_config
from semel.errors import KafkaError, SemelError
from semel.inspect.hanging import OpenTransaction
from semel.inspect.transactions import HeldPartition, KnownTransaction
from semel.web.clusters import ClusterPool, LookTooLong
from semel.web.shared import Look, SharedLooks, TooBusy
from semel.web.timeline import open_bars, scale_of


@pytest.fixture
def silent() -> Iterator[str]:
    """A broker that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def pool_of(bootstrap: str) -> ClusterPool:
    settings = {"bootstrap.servers": bootstrap, "socket.connection.setup.timeout.ms": 300}
    return ClusterPool(parse_config(settings).client)


def test_a_look_at_a_cluster_that_says_nothing_ends_at_its_deadline(silent: str) -> None:
    """Whatever the job handles, and long before the client itself would give up."""

    def job(cluster: Cluster) -> None:
        for _ in range(100):
            with suppress(SemelError):
                cluster.list_topics()

    pool = pool_of(silent)
    began = time.monotonic()
    with pytest.raises(LookTooLong, match="took too long"):
        pool.run(job, deadline_s=0.5)
    assert time.monotonic() - began < 5
    pool.close()


def test_a_page_about_a_cluster_that_says_nothing_comes_at_once(silent: str) -> None:
    """It says that it is looking."""
    with running_page({"bootstrap.servers": silent}) as page:
        for path in ("/transactions", "/groups", "/topics", "/"):
            began = time.monotonic()
            answer = page.get(path)
            assert (answer.status, "data-pending" in answer.text) == (200, True)
            assert time.monotonic() - began < 3


def test_a_page_about_a_cluster_that_is_not_there_says_so() -> None:
    """One sentence, and the status of a gateway."""
    with running_page({"bootstrap.servers": "127.0.0.1:1"}) as page:
        answer = page.settled("/topics")
        assert (answer.status, 'class="banner bad"' in answer.text) == (502, True)
        overview = page.until(lambda text: "…</b>" not in text, "/")
        assert '<a id="tile-open" href="/transactions"><b>-</b>' in overview.text


def test_what_was_seen_stays_when_the_next_look_fails() -> None:
    """With the error beside it."""

    async def run() -> tuple[Look[int], Look[int]]:
        looks = SharedLooks(pool_of("127.0.0.1:1"))
        seen = await looks.ask("key", lambda _: 7, fresh_s=0, patience_s=5)

        def fail(_: Cluster) -> int:
            raise KafkaError("It is gone.")

        failed = seen
        while failed.error is None:
            failed = await looks.ask("key", fail, fresh_s=0, patience_s=5)
            await asyncio.sleep(0.01)
        looks.close()
        return seen, failed

    seen, failed = asyncio.run(run())
    assert (seen.value, seen.error) == (7, None)
    assert (failed.value, failed.at, str(failed.error)) == (7, seen.at, "It is gone.")


def test_what_takes_long_is_looked_at_less_often() -> None:
    """A look of half a second is followed by two seconds of rest, whatever is asked."""

    async def run() -> tuple[int, float]:
        looks, count = SharedLooks(pool_of("127.0.0.1:1")), 0

        def look(_: Cluster) -> int:
            nonlocal count
            count += 1
            time.sleep(0.5)  # stands for a large cluster
            return count

        began = time.monotonic()
        while (await looks.ask("key", look, fresh_s=0.1, patience_s=5)).value == 1:
            await asyncio.sleep(0.02)
        looks.close()
        return count, time.monotonic() - began

    count, took_s = asyncio.run(run())
    assert count == 2
    assert took_s >= 0.5 + 4 * 0.5


def test_there_is_a_bound_on_what_is_asked_at_a_time() -> None:
    """Then the page says that it is busy, and goes on when some are answered."""
    free = threading.Event()

    async def run() -> None:
        looks = SharedLooks(pool_of("127.0.0.1:1"))
        asked = 0
        with suppress(TooBusy):
            for asked in range(100):
                await looks.ask(asked, lambda _: free.wait(30), patience_s=0)
        assert asked == 32
        free.set()
        for number in range(asked):
            assert (await looks.ask(number, lambda _: True, patience_s=30)).value is True
        assert (await looks.ask("one more", lambda _: 1, patience_s=30)).value == 1
        looks.close()

    asyncio.run(run())


# -- the timeline ------------------------------------------------------------------------------------------------------


def known(name: str, producer_id: int, start_ms: int, *partitions: TopicPartition) -> KnownTransaction:
    description = TransactionDescription(name, "Ongoing", 60_000, start_ms, producer_id, 1, partitions)
    return KnownTransaction(description, 1, 5)


def held(partition: int, producer_id: int, standing: str, since_ms: int) -> HeldPartition:
    state = ProducerState(producer_id, 1, 0, 0, 0, 4)
    holder = OpenTransaction("orders", partition, state, standing, "why", "writer")  # type: ignore[arg-type]
    return HeldPartition("orders", partition, 4, 9, holder, since_ms)


def test_what_hangs_has_a_bar_of_its_own_and_comes_first() -> None:
    """It is no part of the transaction that its producer has open now."""
    here, there = TopicPartition("orders", 0), TopicPartition("orders", 1)
    bars = open_bars(
        [known("young", 8, 900), known("writer", 7, 500, here)],
        [held(0, 7, "alive", 500), held(1, 7, "hanging", 100), held(2, 9, "unknown", 50)],
    )
    assert [(bar.producer_id, bar.standing, bar.since_ms) for bar in bars] == [
        (7, "hanging", 100),
        (9, "unknown", 50),
        (7, "alive", 500),
        (8, "alive", 900),
    ]
    assert [one.partition for one in bars[2].held] == [0]
    assert bars[0].partitions == (there,)


def test_the_scale_holds_what_is_old_and_what_is_new() -> None:
    """From the oldest at 0 to now at 100, in order, and never outside."""
    day_ms = 86_400_000
    bars = open_bars([known("old", 1, 0), known("new", 2, day_ms - 200)], [])
    scale = scale_of(bars, day_ms)
    places = [scale.at(time_ms) for time_ms in (0, day_ms // 2, day_ms - 60_000, day_ms - 200, day_ms, day_ms + 5_000)]
    assert places == sorted(places)
    assert (places[0], places[-1]) == (0.0, 100.0)
    assert places[3] < 97
    assert [tick.at for tick in scale.ticks] == sorted(tick.at for tick in scale.ticks)
