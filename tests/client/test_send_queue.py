"""One partition's batches under lost answers, lost requests and refusals, against a model of the leader."""

from __future__ import annotations

import os
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from semel.client.send_queue import SEQUENCES, OutgoingBatch, SendQueue

IN_FLIGHT_MAX = 5
SEEDS = 300


@dataclass
class Leader:
    """What a broker does with an idempotent producer's batches, written as plainly as can be."""

    log: list[int] = field(default_factory=list)
    next_sequence: int | None = None
    """Of a producer that it does not know, a leader takes any sequence."""
    last_five: deque[int] = field(default_factory=lambda: deque(maxlen=5))

    def append(self, number: int, sequence: int, count: int) -> str:
        if sequence in self.last_five:
            return "stored"
        if self.next_sequence not in (None, sequence):
            return "gap"
        self.log.append(number)
        self.last_five.append(sequence)
        self.next_sequence = (sequence + count) % SEQUENCES
        return "stored"


def make_batch(count: int = 1) -> OutgoingBatch:
    return OutgoingBatch("t", 0, memoryview(b""), count, deadline=0.0)


def run(seed: int, first_sequence: int) -> tuple[list[int], list[int]]:
    """Push numbered batches through a queue while connections break and the leader is busy; returns (sent, log)."""
    chance = random.Random(seed)
    queue = SendQueue(next_sequence=first_sequence)
    leader = Leader()
    numbers: dict[int, int] = {}
    waiting = [make_batch(chance.randint(1, 50)) for _ in range(chance.randint(1, 40))]
    for number, batch in enumerate(waiting):
        numbers[id(batch)] = number
    to_add = deque(waiting)
    connection: deque[tuple[OutgoingBatch, str]] = deque()
    leader_is_away = chance.random() < 0.3
    while to_add or not queue.is_empty:
        event = chance.random()
        if to_add and event < 0.3:
            queue.add(to_add.popleft())
        elif event < 0.65 and len(connection) < IN_FLIGHT_MAX and queue.peek() is not None:
            batch = queue.take()
            assert batch.sequence is not None
            if leader_is_away:
                connection.append((batch, "busy"))
            else:
                connection.append((batch, leader.append(numbers[id(batch)], batch.sequence, batch.record_count)))
        elif event < 0.9 and connection:
            batch, answer = connection.popleft()
            if answer == "stored":
                queue.settle(batch, is_stored=True)
            else:
                assert answer == "busy" or not queue.is_oldest_unsettled(batch), "a gap that nothing explains"
                queue.give_back(batch)
        elif event < 0.95:
            leader_is_away = not leader_is_away
        else:
            while connection:  # the connection is cut: no answer comes, stored or not
                queue.give_back(connection.popleft()[0])
    return list(range(len(waiting))), leader.log


@pytest.mark.parametrize("first_sequence", [0, SEQUENCES - 20], ids=["from zero", "across the wrap"])
def test_each_batch_is_stored_once_and_in_order_whatever_is_lost(first_sequence: int) -> None:
    """Cuts, lost answers and refusals neither lose, repeat nor reorder a batch, also where sequences wrap."""
    base = int(os.environ["SEMEL_SEED"])
    for seed in range(base, base + SEEDS):
        sent, log = run(seed, first_sequence)
        assert log == sent, f"seed {seed}"


def test_nothing_leaves_behind_a_returned_batch_until_the_flight_has_settled() -> None:
    """A batch sent past a failed one would make a gap that the leader refuses."""
    queue = SendQueue(is_known=True)
    for _ in range(3):
        queue.add(make_batch(10))
    first, second = queue.take(), queue.take()
    queue.give_back(first)
    assert queue.peek() is None
    queue.give_back(second)
    assert [queue.take().sequence, queue.take().sequence, queue.take().sequence] == [0, 10, 20]


def test_batches_go_again_in_the_order_of_sending_whichever_comes_back_first() -> None:
    """One that finds no connection comes back before those that the last one took with it (simulation, seed 122)."""
    queue = SendQueue(is_known=True)
    for _ in range(3):
        queue.add(make_batch(10))
    first, second = queue.take(), queue.take()
    queue.give_back(second)
    queue.give_back(first)
    assert [queue.take().sequence, queue.take().sequence, queue.take().sequence] == [0, 10, 20]


def test_giving_up_takes_what_was_sent_and_leaves_what_was_not() -> None:
    """KIP-360: batches in flight behind a failed one are refused with it; those never sent go on in a new epoch."""
    queue = SendQueue(is_known=True)
    batches = [make_batch(10) for _ in range(4)]
    for batch in batches:
        queue.add(batch)
    failed, behind = queue.take(), queue.take()
    queue.settle(failed, is_stored=False)
    queue.give_back(behind)
    assert queue.fail_unsettled() == [behind]
    queue.restart_sequences()
    assert queue.take() is batches[2]
    assert batches[2].sequence == 0


def test_sequences_do_not_restart_while_a_batch_may_be_stored() -> None:
    """Under a new epoch the leader could not recognise it, and it would be stored twice."""
    queue = SendQueue()
    queue.add(make_batch())
    queue.take()
    with pytest.raises(AssertionError):
        queue.restart_sequences()
