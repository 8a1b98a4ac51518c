"""The cut: no transaction of the source is torn, whatever the interleaving. SEMEL_MIRROR_SEEDS=10000 for the bar."""

from __future__ import annotations

import os
import random

import pytest
from source_model import SimulatedMirror, SourceModel

from semel.bridges.mirror.cuts import CutFinder
from semel.client.partitions import TopicPartition

SEEDS = int(os.environ.get("SEMEL_MIRROR_SEEDS", "150"))
P, Q, R = (TopicPartition("t", number) for number in range(3))


def simulate(seed: int) -> SimulatedMirror:
    """Run source and mirror side by side, judge every cut, and at the end compare every record."""
    rng = random.Random(seed)
    source = SourceModel(
        rng,
        partitions=rng.randint(1, 4),
        producers=rng.randint(1, 4),
        protocols=rng.choice([(1,), (2,), (1, 2)]),
    )
    mirror = SimulatedMirror(source, rng)
    for _ in range(rng.randint(20, 200)):
        for _ in range(rng.randint(0, 3)):
            source.grow()
        mirror.step()
        assert not source.torn(mirror.committed), f"seed {seed}: torn at {mirror.committed}"
        assert not source.undecided_below(mirror.committed), f"seed {seed}: undecided at {mirror.committed}"
    source.come_to_rest()
    mirror.read_everything()
    mirror.cut()
    judge_the_end(source, mirror, seed)
    return mirror


def judge_the_end(source: SourceModel, mirror: SimulatedMirror, seed: int) -> None:
    for partition, log in source.logs.items():
        wanted = [
            (entry.start, entry.end)
            for entry in log
            if entry.marker is None and (entry.transaction is None or source.outcomes[entry.transaction] == "commit")
        ]
        assert mirror.copied[partition] == wanted, f"seed {seed}: {partition} is not equal"
        assert mirror.committed[partition] == source.end(partition), f"seed {seed}: {partition} did not get to its end"


def test_no_interleaving_delay_or_crash_tears_a_transaction_or_loses_a_record() -> None:
    """Random sources of both protocols; each cut is judged by the truth, and all records are equal at the end."""
    cuts = sum(simulate(seed).cuts for seed in range(SEEDS))
    assert cuts > SEEDS  # the mirror did not wait for the end


def test_the_cut_is_the_largest_that_the_truth_allows() -> None:
    """Protocol 2, and everything read: the slow model, which knows which record is whose, finds the same cut."""
    for seed in range(SEEDS):
        rng = random.Random(seed)
        source = SourceModel(rng, partitions=rng.randint(1, 4), producers=rng.randint(1, 4), protocols=(2,))
        mirror = SimulatedMirror(source, rng)
        for _ in range(rng.randint(1, 60)):
            source.grow()
        mirror.read_everything()
        found = {**mirror.finder.cut_offsets, **mirror.finder.find_ends()}
        assert found == source.largest_cut(mirror.finder.positions), f"seed {seed}"


def test_a_mirror_that_cuts_where_its_batches_end_tears_transactions() -> None:
    """The judge can fail: cutting at what was read, or at the last stable offsets, tears many."""
    torn_by_reads = torn_by_stable_offsets = 0
    for seed in range(30):
        rng = random.Random(seed)
        source = SourceModel(rng, partitions=3, producers=3, protocols=(1, 2))
        for _ in range(60):
            source.grow()
            some = {partition: rng.randint(0, source.end(partition)) for partition in source.logs}
            torn_by_reads += bool(source.torn(some))
            torn_by_stable_offsets += bool(source.torn(last_stable_offsets(source)))
    assert torn_by_reads > 100
    assert torn_by_stable_offsets > 100


def last_stable_offsets(source: SourceModel) -> dict[TopicPartition, int]:
    stable: dict[TopicPartition, int] = {}
    for partition, log in source.logs.items():
        ended = {entry.transaction for entry in log if entry.marker}
        open_ones = [entry.start for entry in log if entry.transaction is not None and entry.transaction not in ended]
        stable[partition] = min(open_ones, default=source.end(partition))
    return stable


def pass_barrier(finder: CutFinder) -> None:
    finder.set_barrier(finder.event, finder.positions)
    assert finder.try_pass_barrier()


def test_a_transaction_waits_for_its_last_marker() -> None:
    """Committed in one partition and not yet in the other: neither part goes over."""
    finder = CutFinder({P: 0, Q: 0})
    finder.add_batch(P, 0, 2, producer=(7, 0), size=1, now=0)
    finder.add_batch(Q, 0, 1, producer=(7, 0), size=1, now=0)
    finder.add_marker(P, 2, (7, 1), "commit")
    pass_barrier(finder)
    assert finder.find_ends() == {}
    finder.add_marker(Q, 1, (7, 1), "commit")
    assert finder.find_ends() == {P: 3, Q: 2}


def test_a_marker_alone_does_not_say_that_a_transaction_is_known() -> None:
    """Its records in another partition may not have been read yet, until a barrier was passed."""
    finder = CutFinder({P: 0, Q: 0})
    finder.add_batch(P, 0, 2, producer=(7, 0), size=1, now=0)
    finder.add_marker(P, 2, (7, 1), "commit")
    assert finder.find_ends() == {}
    finder.set_barrier(finder.event, {P: 3, Q: 2})
    assert not finder.try_pass_barrier()
    finder.add_batch(Q, 0, 1, producer=(7, 0), size=1, now=0)
    finder.add_marker(Q, 1, (7, 1), "commit")
    assert finder.try_pass_barrier()
    assert finder.find_ends() == {P: 3, Q: 2}


def test_what_hangs_stops_only_partitions_that_it_or_a_transaction_behind_it_touches() -> None:
    """P hangs. R goes on, and so does Q up to the first transaction that also wrote into P behind the open one."""
    finder = CutFinder({P: 0, Q: 0, R: 0})
    finder.add_batch(P, 0, 1, producer=(1, 0), size=1, now=0)  # never ends
    finder.add_batch(Q, 0, 1, producer=(2, 0), size=1, now=0)
    finder.add_marker(Q, 1, (2, 1), "commit")
    finder.add_batch(Q, 2, 3, producer=(3, 0), size=1, now=0)
    finder.add_batch(P, 1, 2, producer=(3, 0), size=1, now=0)
    finder.add_marker(Q, 3, (3, 1), "commit")
    finder.add_marker(P, 2, (3, 1), "commit")
    finder.add_batch(R, 0, 5, size=1, now=0)
    pass_barrier(finder)
    assert finder.find_ends() == {Q: 2, R: 5}


def test_transactions_of_one_epoch_are_told_apart_at_a_quiet_moment() -> None:
    """Protocol 1: with a barrier between two transactions the first goes over while the second is open."""
    finder = CutFinder({P: 0, Q: 0})
    finder.add_batch(P, 0, 1, producer=(7, 0), size=1, now=0)
    finder.add_marker(P, 1, (7, 0), "commit")
    pass_barrier(finder)
    finder.add_batch(Q, 0, 1, producer=(7, 0), size=1, now=0)
    assert finder.find_ends() == {P: 2}


def test_transactions_of_one_epoch_that_cannot_be_told_apart_go_over_together() -> None:
    """Protocol 1: without such a moment the commit in P may be of the transaction that is still open in Q."""
    finder = CutFinder({P: 0, Q: 0})
    finder.add_batch(P, 0, 1, producer=(7, 0), size=1, now=0)
    finder.add_marker(P, 1, (7, 0), "commit")
    finder.add_batch(Q, 0, 1, producer=(7, 0), size=1, now=0)
    pass_barrier(finder)
    assert finder.find_ends() == {}
    finder.add_marker(Q, 1, (7, 0), "commit")
    pass_barrier(finder)
    assert finder.find_ends() == {P: 2, Q: 2}


def test_an_aborted_transaction_holds_nothing_together() -> None:
    """Nothing of it goes over, so it need not be whole."""
    finder = CutFinder({P: 0, Q: 0})
    finder.add_batch(P, 0, 1, producer=(7, 0), size=1, now=0)
    finder.add_batch(Q, 0, 1, producer=(7, 0), size=1, now=0)
    finder.add_marker(P, 1, (7, 1), "abort")
    pass_barrier(finder)
    assert finder.find_ends() == {P: 2}
    assert finder.take({P: 2}).pieces == {}


@pytest.mark.parametrize("bytes_max", [1, 10, 25])
def test_a_cut_of_a_chosen_size_is_larger_only_where_a_smaller_one_would_tear(bytes_max: int) -> None:
    """Ten transactions over two partitions, one after the other: each can go over alone."""
    finder = CutFinder({P: 0, Q: 0})
    for number in range(10):
        for partition in (P, Q):
            finder.add_batch(partition, 2 * number, 2 * number + 1, producer=(7, number), size=5, now=0)
        for partition in (P, Q):
            finder.add_marker(partition, 2 * number + 1, (7, number + 1), "commit")
    pass_barrier(finder)
    ends = finder.find_ends(bytes_max)
    assert ends[P] == ends[Q] or abs(ends[P] - ends[Q]) <= 1  # at most the marker between
    assert sum(piece.size for pieces in finder.take(ends).pieces.values() for piece in pieces) <= max(10, bytes_max)
