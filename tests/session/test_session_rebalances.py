"""A session whose group changes around it, on the embedded broker with both protocols of transactions and of groups."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from kio.schema.errors import ErrorCode
from session_scene import BROKER_CONFIG, GROUP_PROTOCOLS, Pipeline, copy_all, copy_turn, wait_until

from semel.broker.faults import Cut, Delay, Error
from semel.client.producer import Outcome
from semel.errors import Fenced
from semel.session.claims import Safety
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api


@pytest.fixture(scope="module", params=[2, 1], ids=["protocol-2", "protocol-1"])
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    config = {**BROKER_CONFIG, "transaction.version": str(request.param)}
    with EmbeddedBroker(config=config, fsync="never") as broker:
        yield broker


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_a_partition_that_is_asked_back_makes_the_transaction_abort(broker: EmbeddedBroker, protocol: str) -> None:
    """D2: the block runs to its end, its writes leave no trace, and the new owner processes the records."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(40))
    with pipeline.session("a") as first:
        with first.transaction(10_000) as transaction:
            transaction.send_table(pipeline.target, transaction.table)
            before = len(first.partitions)
            with pipeline.session("b") as second:
                wait_until(lambda: copy_turn(second, pipeline, 100) > 0, "the other's share")
                transaction.send_table(pipeline.target, transaction.table)
        assert before == 2
        assert transaction.outcome is Outcome.ABORTED
        assert "took" in str(transaction.reason)
        wait_until(lambda: copy_turn(first, pipeline, 100) >= 0 and sum(pipeline.counts().values()) >= 40, "the rest")
    assert pipeline.counts() == Counter(range(40))


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_a_member_that_was_removed_cannot_commit(broker: EmbeddedBroker, protocol: str) -> None:
    """D3: the heartbeat before the commit finds out, and no commit is asked for."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(20))
    api, code = (
        (Api.CONSUMER_GROUP_HEARTBEAT, ErrorCode.unknown_member_id)
        if protocol == "consumer"
        else (Api.HEARTBEAT, ErrorCode.unknown_member_id)
    )
    with pipeline.session(heartbeat_interval_ms=1_000) as session:
        with session.transaction(10_000) as transaction:
            transaction.send_table(pipeline.target, transaction.table)
            committed = broker.faults.inject(
                Api.END_TXN,
                Delay(0),
                when=lambda request: request.committed and request.transactional_id == session.transactional_id,
            )
            broker.faults.inject(api, Error(code), when=lambda request: request.group_id == pipeline.group)
        assert (transaction.outcome, committed.served) == (Outcome.ABORTED, 0)
        broker.faults.clear()
        copy_all(session, pipeline, 20)
    assert pipeline.counts() == Counter(range(20))


@pytest.mark.parametrize("carried_out", [False, True])
def test_a_commit_whose_answer_is_lost_is_found_out(broker: EmbeddedBroker, carried_out: bool) -> None:
    """D5: committed or aborted, and no record is lost or repeated either way."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    with pipeline.session(default_api_timeout_ms=2_000) as session:
        broker.faults.inject(
            Api.END_TXN,
            Cut(carried_out),
            times=3 if carried_out else 1,
            when=lambda request: request.transactional_id == session.transactional_id,
        )
        copy_all(session, pipeline, 20)
    broker.faults.clear()
    assert pipeline.counts() == Counter(range(20))


def test_of_two_sessions_with_one_instance_the_first_stops_with_one_sentence(broker: EmbeddedBroker) -> None:
    """D5: fenced means stop; what it had not committed leaves no trace."""
    pipeline = Pipeline(broker.bootstrap)
    pipeline.write(range(20))
    with pipeline.session("same") as first:

        def be_overtaken() -> None:
            with first.transaction(10_000) as transaction:
                transaction.send_table(pipeline.target, transaction.table)
                pipeline.session("same").__enter__().close()
                transaction.send_table(pipeline.target, transaction.table)

        with pytest.raises(Fenced, match=r"Another producer with the same transactional\.id has taken over"):
            be_overtaken()
        assert pipeline.counts() == Counter()
    with pipeline.session("same") as third:
        copy_all(third, pipeline, 20)
    assert pipeline.counts() == Counter(range(20))


@pytest.mark.parametrize("stable", [True, False])
def test_where_offsets_cannot_be_waited_for_a_rebalance_waits_a_moment_after_each_commit(
    broker: EmbeddedBroker, stable: bool
) -> None:
    """D4: 200 ms for the markers, as on brokers before 2.5; none where the offsets' readers wait themselves."""
    pipeline = Pipeline(broker.bootstrap, "range")
    pipeline.write(range(4))
    with pipeline.session(safety=Safety(stable_fetches=stable)) as session:
        copy_all(session, pipeline, 4)
        partitions = session.partitions
        claims = session._turns._claims  # pyright: ignore
        assert claims.may_release(partitions) is stable
        started = time.monotonic()
        wait_until(lambda: claims.may_release(partitions), "the end of the pause")
        assert time.monotonic() - started < 1.0
