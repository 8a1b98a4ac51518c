"""The whole broker on a simulated disk that crashes at every operation of a fixed scenario and tears every write.

The scenario is played once, and its disk kept as it was before each operation; a broker is then started on each of
these. The default run takes a sample by SEMEL_SEED. The whole is behind the marker `chaos`, of which CI does a tenth:
SEMEL_CHAOS_KILLS=200 does it all.
"""

from __future__ import annotations

import copy
import errno
import os
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from broker_disk_check import check
from broker_disk_scenario import Moment, Promises, Transaction, record

from semel.broker.durability import Fsync
from semel.testing.simulated_disk import SimulatedDisk
from semel.wire.api import Api

SEED = int(os.environ["SEMEL_SEED"])
WHOLE_KILLS = 200
SHARE = min(1.0, int(os.environ.get("SEMEL_CHAOS_KILLS", "20")) / WHOLE_KILLS)
SAMPLE = 25
AHEAD_MS = 4_000  # about as long as the scenario takes

KINDS = [(fsync, protocol) for fsync in Fsync for protocol in (1, 2)]
each_kind = pytest.mark.parametrize(("fsync", "protocol"), KINDS, ids=[f"{f.value}-{p}" for f, p in KINDS])


@cache
def moments(fsync: Fsync, protocol: int) -> list[Moment]:
    return record(fsync, protocol)


def sample(everything: Iterable[Moment], share: float) -> list[Moment]:
    found = list(everything)
    count = round(len(found) * share)
    return random.Random(SEED).sample(found, count) if count < len(found) else found


def check_crash(moment: Moment, fsync: Fsync, protocol: int, *, power_cut: bool) -> None:
    number = moment.number
    try:
        check(
            moment.disk.reboot(power_cut=power_cut, seed=number),
            copy.deepcopy(moment.promises),
            fsync=fsync,
            protocol=protocol,
            power_cut=power_cut,
            resends=number % 2 == 0,
            ahead_ms=0 if number % 5 == 0 else AHEAD_MS,
        )
    except BaseException as error:
        error.add_note(f"crashed before operation {number}, {moment.what}, {power_cut=}")
        raise


def check_torn(moment: Moment, count: int, fsync: Fsync, protocol: int) -> None:
    try:
        check(
            moment.torn_after(count),
            copy.deepcopy(moment.promises),
            fsync=fsync,
            protocol=protocol,
            power_cut=False,
            resends=count % 2 == 0,
            ahead_ms=AHEAD_MS,
            goes_on=count % 10 == 0,
        )
    except BaseException as error:
        error.add_note(f"killed after {count} bytes of operation {moment.number}, {moment.what}")
        raise


def writes_of(fsync: Fsync, protocol: int) -> list[tuple[Moment, int]]:
    """Each byte of each write into a log; of the small files that a rename puts in place, the ends and one between."""
    found: list[tuple[Moment, int]] = []
    for moment in moments(fsync, protocol):
        if moment.write is not None:
            path, _, data = moment.write
            counts = range(1, len(data)) if path.endswith(".log") else sorted({0, len(data) // 2, len(data) - 1})
            found += [(moment, count) for count in counts]
    return found


@each_kind
@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
def test_a_broker_that_dies_before_some_operations_keeps_its_promises(
    fsync: Fsync, protocol: int, power_cut: bool
) -> None:
    """Acknowledged per mode is there, transactions are whole or absent, readers get to the end, work goes on."""
    everything = moments(fsync, protocol)
    for moment in sample(everything, SAMPLE / len(everything)):
        check_crash(moment, fsync, protocol, power_cut=power_cut)


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_broker_that_dies_within_some_writes_keeps_its_promises(protocol: int) -> None:
    """A write of which only the beginning went out: nothing of it counts, and nothing else is harmed."""
    everything = writes_of(Fsync.COMMIT, protocol)
    for moment, count in random.Random(SEED).sample(everything, 2 * SAMPLE):
        check_torn(moment, count, Fsync.COMMIT, protocol)


@pytest.mark.chaos
@each_kind
@pytest.mark.parametrize("power_cut", [False, True], ids=["killed", "power cut"])
def test_a_broker_that_dies_before_any_operation_keeps_its_promises(
    fsync: Fsync, protocol: int, power_cut: bool
) -> None:
    """The same at every operation."""
    for moment in sample(moments(fsync, protocol), SHARE):
        check_crash(moment, fsync, protocol, power_cut=power_cut)


@pytest.mark.chaos
@pytest.mark.parametrize("protocol", [1, 2])
def test_a_broker_that_dies_within_any_write_keeps_its_promises(protocol: int) -> None:
    """The same at every byte of every write into a log."""
    everything = writes_of(Fsync.COMMIT, protocol)
    for moment, count in random.Random(SEED).sample(everything, round(len(everything) * SHARE)):
        check_torn(moment, count, Fsync.COMMIT, protocol)


def test_the_scenario_meets_everything_that_it_is_meant_to() -> None:
    """Segments roll, logs are compacted, an index of aborted transactions and snapshots are written, a topic goes."""
    written = {moment.write[0] for moment in moments(Fsync.COMMIT, 2) if moment.write is not None}
    for part in ("a-0/", "a-1/", "b-0/", "compacted-0/", "__transaction_state-0/", "__consumer_offsets-0/"):
        assert any(part in path and path.endswith(".snapshot.tmp") for path in written), part
    for part in ("compacted-0/", "__transaction_state-0/", "__consumer_offsets-0/"):
        assert any(part in path and path.endswith(".cleaned") for path in written), part
    assert any(path.endswith(".txnindex.tmp") for path in written)
    last = moments(Fsync.COMMIT, 2)[-1].promises
    assert last.topics["doomed"] == "gone"
    assert [one.state for one in last.transactions].count("committed") == 5


class RefusesOnce(SimulatedDisk):
    """One write to one partition does not fit on the disk, later ones do."""

    def __init__(self, whole: SimulatedDisk, partition: str) -> None:
        super().__init__()
        self.__dict__.update(whole.reboot(power_cut=False).__dict__)
        self._partition = partition

    def write(self, handle: int, buffers: Sequence[Any], position: int) -> int:
        path = next(path for path, file in self._names.items() if file is self._handles[handle])
        if self._partition and path.startswith(self._partition) and path.endswith(".log"):
            self._partition = ""
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(handle, buffers, position)


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize("partition", ["data/a-0/", "data/b-0/"])
def test_a_decided_commit_whose_markers_do_not_fit_at_recovery_is_not_aborted(protocol: int, partition: str) -> None:
    """Recovery must not take it for a transaction that nobody knows: its markers are written when there is space."""
    decided = next(
        moment
        for moment in moments(Fsync.COMMIT, protocol)
        if moment.write is not None
        and moment.write[0].startswith("data/a-0/")
        and moment.promises.pending is not None
        and moment.promises.pending[0] is Api.END_TXN
        and moment.promises.transactions[-1].wants_commit
    )
    for resends in (False, True):
        promises = copy.deepcopy(decided.promises)
        promises.transactions[-1].state = "committed"  # the decision is logged: nothing can stop it any more
        check(
            RefusesOnce(decided.disk, partition),
            promises,
            fsync=Fsync.COMMIT,
            protocol=protocol,
            power_cut=False,
            resends=resends,
            ahead_ms=AHEAD_MS,
        )


def _lose_a_record(promises: Promises) -> None:
    promises.plain["never written"] = ("a", 0)
    promises.acknowledged.add("never written")


def _commit_what_was_aborted(promises: Promises) -> None:
    next(one for one in promises.transactions if one.state == "aborted").state = "committed"


def _abort_what_was_committed(promises: Promises) -> None:
    next(one for one in promises.transactions if one.state == "committed").state = "aborted"


def _halve_a_transaction(promises: Promises) -> None:
    transaction = next(one for one in promises.transactions if one.state == "committed")
    transaction.state = "ending"
    transaction.values["never written"] = ("b", 0)


def _move_the_group(promises: Promises) -> None:
    promises.transactions.append(Transaction({"last/0": ("a", 0)}, 51, "committed"))


@pytest.mark.parametrize(
    ("break_promise", "complaint"),
    [
        (_lose_a_record, "never written"),
        (_commit_what_was_aborted, "committed, and lost"),
        (_abort_what_was_committed, "not committed, and seen"),
        (_halve_a_transaction, "half a transaction"),
        (_move_the_group, "stands at 50, not at 51"),
    ],
)
def test_the_check_sees_a_broken_promise(break_promise: Callable[[Promises], None], complaint: str) -> None:
    """A check that cannot fail proves nothing."""
    moment = moments(Fsync.COMMIT, 2)[-1]
    promises = copy.deepcopy(moment.promises)
    break_promise(promises)
    disk = moment.disk.reboot(power_cut=False)
    with pytest.raises(AssertionError, match=complaint):
        check(disk, promises, fsync=Fsync.COMMIT, protocol=2, power_cut=False, ahead_ms=AHEAD_MS)
