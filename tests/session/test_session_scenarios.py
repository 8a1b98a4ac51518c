"""The two scenes that make exactly-once hard in a group, built step by step with requests held back at the broker.

Each is played with the rules on, where no record appears twice, and with the rules off, where it does: so the scene is
the one that is meant. A member that the group has removed is played by one whose group thread leaves in its name while
the rest of it goes on, as after a pause that was longer than its session.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from held_requests import Hold
from session_scene import BROKER_CONFIG, GROUP_PROTOCOLS, Pipeline, copy_all, copy_turn, wait_until

from semel.client.producer import Outcome
from semel.session.claims import Safety
from semel.session.session import Session
from semel.testing.embedded import EmbeddedBroker
from semel.wire import Api

SAFE = Safety()
UNSAFE = Safety(stable_fetches=False, generation_fencing=False, confirmed_commits=False)
ONLY_FENCING = Safety(stable_fetches=False, generation_fencing=True, confirmed_commits=False)
ONLY_CONFIRMED = Safety(stable_fetches=False, generation_fencing=False, confirmed_commits=True)
ONLY_STABLE = Safety(stable_fetches=True, generation_fencing=False, confirmed_commits=False)


@pytest.fixture(scope="module", params=[2, 1], ids=["protocol-2", "protocol-1"])
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    config = {**BROKER_CONFIG, "transaction.version": str(request.param)}
    with EmbeddedBroker(config=config, fsync="never") as broker:
        yield broker


def wait_shared(pipeline: Pipeline, *sessions: Session) -> None:
    """Until each of them reads a partition of its own."""

    def is_shared() -> bool:
        for session in sessions:
            copy_turn(session, pipeline, 10)
        return [len(session.partitions) for session in sessions] == [pipeline.partitions // len(sessions)] * len(
            sessions
        )

    wait_until(is_shared, "a partition for each session")


def remove_from_group(session: Session) -> None:
    membership = session._membership  # pyright: ignore
    assert membership is not None
    membership.close()


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
@pytest.mark.parametrize("safety", [SAFE, ONLY_STABLE, UNSAFE], ids=["safe", "only-stable-fetches", "unsafe"])
def test_p2_crashes_while_committing_and_p1_takes_its_partition_over(
    broker: EmbeddedBroker, protocol: str, safety: Safety
) -> None:
    """Bar 2, D4: P1 reads from the offset of a commit that is on its way only when that has arrived.

    P2 has committed tp-1 up to 5 and its commit up to 10 is under way when the group removes it. If P1 does not wait
    for it, both process 5 to 9, and both are committed.
    """
    pipeline = Pipeline(broker.bootstrap, protocol)
    options = {"safety": safety, "transaction_timeout_ms": 20_000, "transaction_records_max": 5}
    with pipeline.session("p1", **options) as p1, pipeline.session("p2", **options) as p2:
        wait_shared(pipeline, p1, p2)
        (moved,) = p2.partitions
        pipeline.write(range(10), moved.partition)
        assert copy_turn(p2, pipeline, 10_000) == 5
        held = Hold()
        broker.faults.inject(Api.END_TXN, held, when=lambda request: request.transactional_id == p2.transactional_id)
        commit = threading.Thread(target=copy_turn, args=(p2, pipeline, 10_000))
        commit.start()
        assert held.has_arrived.wait(10)
        remove_from_group(p2)
        started = time.monotonic()
        while safety is not UNSAFE and time.monotonic() - started < 0.5:
            assert copy_turn(p1, pipeline, 50) == 0
        if safety is UNSAFE:
            wait_until(lambda: copy_turn(p1, pipeline, 50) == 5, "P1 to process what P2 has processed")
        held.let_go()
        commit.join()
        pipeline.write(range(10, 15), moved.partition)
        copy_all(p1, pipeline, 5)
        again = Counter(range(5, 10)) if safety is UNSAFE else Counter[int]()
        assert pipeline.counts() == Counter(range(15)) + again
        assert pipeline.open_transactions() == []


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
@pytest.mark.parametrize(
    "safety", [SAFE, ONLY_FENCING, ONLY_CONFIRMED, UNSAFE], ids=["safe", "only-fencing", "only-confirmed", "unsafe"]
)
def test_a_commits_after_b_took_over(broker: EmbeddedBroker, protocol: str, safety: Safety) -> None:
    """Bar 2, C1, D2, D3: A has processed records and not sent its offsets when B gets their partition.

    B processes them and commits; then A goes on. Without the heartbeat before the commit and without the generation in
    its offsets, A never learns, and both are committed. Either of the two rules is enough here.
    """
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(10))
    with pipeline.session("a", safety=safety, transaction_timeout_ms=20_000) as a:
        with a.transaction(10_000) as transaction:
            transaction.send_table(pipeline.target, transaction.table)
            processed = Counter(int(value) for value in transaction.table["value"].to_pylist())
            remove_from_group(a)
            with pipeline.session("b", safety=safety, transaction_timeout_ms=20_000) as b:
                copy_all(b, pipeline, 10)
        assert transaction.outcome is (Outcome.COMMITTED if safety is UNSAFE else Outcome.ABORTED)
        assert pipeline.counts() == Counter(range(10)) + (processed if safety is UNSAFE else Counter[int]())
        assert pipeline.open_transactions() == []


@pytest.mark.parametrize("protocol", GROUP_PROTOCOLS)
def test_a_rebalance_waits_until_the_commit_is_answered(broker: EmbeddedBroker, protocol: str) -> None:
    """D3: while EndTxn is under way nobody gets the partitions, and the commit counts."""
    pipeline = Pipeline(broker.bootstrap, protocol)
    pipeline.write(range(10))
    with pipeline.session("a") as a:
        held = Hold()
        broker.faults.inject(Api.END_TXN, held, when=lambda request: request.transactional_id == a.transactional_id)
        copied: list[int] = []
        commit = threading.Thread(target=lambda: copied.append(copy_turn(a, pipeline, 10_000)))
        commit.start()
        assert held.has_arrived.wait(10)
        with pipeline.session("b") as b:
            started = time.monotonic()
            while time.monotonic() - started < 0.5:
                assert (copy_turn(b, pipeline, 50), b.partitions) == (0, frozenset())
            held.let_go()
            commit.join()
            assert copied[0] > 0
            wait_shared(pipeline, a, b)
            wait_until(
                lambda: copy_turn(a, pipeline, 20) + copy_turn(b, pipeline, 20) >= 0 and len(pipeline.counts()) == 10,
                "the rest",
            )
    assert pipeline.counts() == Counter(range(10))
