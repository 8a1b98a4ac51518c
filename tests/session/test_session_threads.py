"""A session and its threads: asyncio with cancellation, two threads at once, and calls from inside of itself."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from held_requests import Hold
from session_scene import BROKER_CONFIG, Pipeline, copy_all, wait_until

from semel.client.producer import Outcome
from semel.errors import Fenced, InvalidState
from semel.session.session import Session
from semel.session.transaction import Transaction
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(config=BROKER_CONFIG, fsync="never") as broker:
        yield broker


@pytest.fixture
def pipeline(broker: EmbeddedBroker) -> Iterator[Pipeline]:
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    yield pipeline
    broker.faults.clear()


# -- asyncio -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_loop", [True, False])
def test_a_cancelled_session_ends_its_commit_before_it_closes(
    broker: EmbeddedBroker, pipeline: Pipeline, as_loop: bool
) -> None:
    """`close` ran beside the commit, on connections that are for one thread."""
    hold = Hold()
    seen: list[Transaction] = []
    sessions: list[Session] = []

    async def copy() -> None:
        async with pipeline.session() as session:
            sessions.append(session)
            broker.faults.inject(
                Api.END_TXN, hold, when=lambda request: request.transactional_id == session.transactional_id
            )
            if as_loop:
                async for transaction in session:
                    seen.append(transaction)
                    transaction.send_table(pipeline.target, transaction.table)
            else:
                async with session.transaction(10_000) as transaction:
                    seen.append(transaction)
                    transaction.send_table(pipeline.target, transaction.table)

    async def main() -> None:
        task = asyncio.create_task(copy())
        await asyncio.to_thread(hold.has_arrived.wait, 30)
        task.cancel()
        await asyncio.sleep(0.3)
        task.cancel()  # an impatient caller
        assert not task.done()
        hold.let_go()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(main(), 60))
    assert seen[0].outcome is Outcome.COMMITTED
    done = seen[0].table.num_rows
    assert sum(pipeline.counts().values()) == done == sum(pipeline.committed().values())
    with pytest.raises(InvalidState, match="not open"):
        sessions[0].transaction()
    if done < 20:
        with pipeline.session() as session:
            copy_all(session, pipeline, 20 - done)
    assert pipeline.counts() == Counter(range(20))


@pytest.mark.parametrize("where", ["block", "loop", "waiting"])
def test_a_session_that_is_cancelled_elsewhere_aborts_and_leaves(pipeline: Pipeline, where: str) -> None:
    """In the user's block, in `async for`, and while it waits for records: nothing stays open."""
    reached = asyncio.Event()

    async def wait_for_ever() -> None:
        reached.set()
        await asyncio.Event().wait()

    async def copy() -> None:
        async with pipeline.session() as session:
            if where == "waiting":
                async with session.transaction(10_000) as transaction:
                    transaction.send_table(pipeline.target, transaction.table)
                while True:
                    reached.set()
                    async with session.transaction(500):
                        pass
            elif where == "block":
                async with session.transaction(10_000) as transaction:
                    transaction.send_table(pipeline.target, transaction.table)
                    await wait_for_ever()
            else:
                async for transaction in session:
                    transaction.send_table(pipeline.target, transaction.table)
                    await wait_for_ever()

    async def main() -> None:
        task = asyncio.create_task(copy())
        await reached.wait()
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = set(threading.enumerate())
    asyncio.run(asyncio.wait_for(main(), 60))
    assert pipeline.open_transactions() == []
    left = 20 - sum(pipeline.committed().values())
    with pipeline.session() as session:
        copy_all(session, pipeline, left)
    assert pipeline.counts() == Counter(range(20))
    # The broker of this test is in the same process, and has threads of its own.
    of_sessions = ("semel-session-", "semel-group-")
    wait_until(
        lambda: not any(one.name.startswith(of_sessions) for one in set(threading.enumerate()) - before),
        "the end of its threads",
    )


def test_a_loop_that_is_left_can_be_begun_again(pipeline: Pipeline) -> None:
    """`break` out of `async for` aborts the turn, as it does without asyncio."""

    async def main() -> None:
        async with pipeline.session() as session:
            async for transaction in session:
                transaction.send_table(pipeline.target, transaction.table)
                break
            count = 0
            async for transaction in session:
                transaction.send_table(pipeline.target, transaction.table)
                count += transaction.table.num_rows
                if count == 20:
                    session.stop()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert pipeline.counts() == Counter(range(20))


# -- two threads -------------------------------------------------------------------------------------------------------


def in_thread(call: Any) -> BaseException | None:
    """What a call raised in another thread."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_a_transaction_is_refused_in_another_thread(pipeline: Pipeline) -> None:
    """K3: a thread pool inside of the block would write to one connection from two threads."""
    with pipeline.session() as session:
        with session.transaction(10_000) as transaction:
            for call in (
                lambda: transaction.send(pipeline.target, b"x"),
                lambda: transaction.send_table(pipeline.target, transaction.table),
                session.close,
            ):
                error = in_thread(call)
                assert isinstance(error, InvalidState)
                assert "belongs to one thread" in str(error)
            transaction.send_table(pipeline.target, transaction.table)
        assert transaction.outcome is Outcome.COMMITTED
        copy_all(session, pipeline, 20 - transaction.table.num_rows)
    assert pipeline.counts() == Counter(range(20))


def test_a_session_in_use_is_refused_to_a_second_thread(broker: EmbeddedBroker, pipeline: Pipeline) -> None:
    """K3: while it waits for records or for the broker."""
    hold = Hold()
    with pipeline.session() as session:
        copied = threading.Thread(target=copy_all, args=(session, pipeline, 20))
        broker.faults.inject(
            Api.END_TXN, hold, when=lambda request: request.transactional_id == session.transactional_id
        )
        copied.start()
        assert hold.has_arrived.wait(30)
        with pytest.raises(InvalidState, match="belongs to one thread"), session.transaction(10):
            pass
        with pytest.raises(InvalidState, match=r"belongs to one thread.*call stop\(\)"):
            session.close()
        hold.let_go()
        copied.join()
    assert pipeline.counts() == Counter(range(20))


def test_a_session_that_is_used_inside_of_its_own_transaction_says_so(pipeline: Pipeline) -> None:
    """K3: the open transaction goes on."""
    with pipeline.session() as session:
        with session.transaction(10_000) as transaction:
            with pytest.raises(InvalidState, match="open already"), session.transaction(10):
                pass
            with pytest.raises(InvalidState, match="opened once"):
                session.__enter__()
            transaction.send_table(pipeline.target, transaction.table)
        assert transaction.outcome is Outcome.COMMITTED


@pytest.mark.parametrize("protocol", ["cooperative-sticky", "consumer"])
def test_of_two_running_sessions_with_one_instance_the_older_stops(broker: EmbeddedBroker, protocol: str) -> None:
    """K3: the second start takes over at once, and every record is written once."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(20))
    with pipeline.session("same") as first:
        copy_all(first, pipeline, 20)
        with pipeline.session("same") as second:
            pipeline.write(range(20, 40))
            with pytest.raises(Fenced, match="has taken over"):
                copy_all(first, pipeline, 20)
            copy_all(second, pipeline, 20)
    assert pipeline.counts() == Counter(range(40))
