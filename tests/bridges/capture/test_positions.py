"""Which events are written, whatever the server sends again and wherever a run is cut: held against a slow model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from semel.bridges.capture.pgoutput import Begin, Commit
from semel.bridges.capture.positions import CapturePosition, End, Event, Numbering, OtherHistory, position_after

Log = list[tuple[int, int, list[str]]]
"""Transactions in the order of their commits: begin and end of the commit's record, and the changes."""


def make_log(chance: random.Random, transactions: int) -> Log:
    """Some are empty for us; changes of one lie between those of others, so they have no place of their own here."""
    log: Log = []
    lsn = chance.randint(1, 50)
    for number in range(transactions):
        end = lsn + chance.randint(1, 9)
        log.append((lsn, end, [f"{number}.{index}" for index in range(chance.choice([0, 0, 1, 2, 7]))]))
        lsn = end + chance.choice([0, 0, 3])
    return log


def send(log: Log, confirmed: int) -> Iterator[tuple[str, object]]:
    """What a server sends from a slot: each transaction whole whose commit does not lie before the confirmed place."""
    for at, end, changes in log:
        if at >= confirmed:
            yield "begin", Begin(at, 0, at)
            for change in changes:
                yield "change", change
            yield "commit", Commit(at, end)
        yield "passed", end


def expected(log: Log) -> list[tuple[int, int, str]]:
    """The slow model: number and index of every event, counted from the start."""
    found: list[tuple[int, int, str]] = []
    number = 0
    for _, _, changes in log:
        number += bool(changes)
        found += [(number, index, change) for index, change in enumerate(changes)]
        found += [(number, len(changes), "end")] if changes else []
    return found


def run(
    log: Log, position: CapturePosition, confirmed: int, stop_after: int
) -> tuple[list[Event[str] | End], CapturePosition]:
    """One life: reads, and is killed after so many items were written, or when there is nothing left."""
    numbering, written = Numbering[str](position), list[Event[str] | End]()
    for kind, what in send(log, confirmed):
        item = None
        if kind == "begin":
            assert isinstance(what, Begin)
            numbering.begin(what)
        elif kind == "change":
            item = numbering.change(str(what))
        elif kind == "commit":
            assert isinstance(what, Commit)
            item = numbering.commit(what)
        else:
            assert isinstance(what, int)
            numbering.passed(what)
        if item is not None:
            written.append(item)
            position = position_after(item, {})
            if len(written) == stop_after:
                return written, position
        elif (moved := numbering.position) is not None:
            assert moved.place >= position.place
            position = moved
    return written, position


@pytest.mark.parametrize("seed", range(300))
def test_each_event_is_written_once_with_its_number_though_lives_are_cut_anywhere(seed: int) -> None:
    """Each life begins at the position of the one before, with a slot that may be confirmed anywhere before it."""
    chance = random.Random(seed)
    log = make_log(chance, chance.randint(1, 12))
    position, found = CapturePosition(1), list[tuple[int, int, str]]()
    for _ in range(100):
        confirmed = chance.choice([1, position.lsn, chance.randint(0, position.lsn)])
        written, position = run(log, position, confirmed, chance.choice([1, 2, 5, 1000]))
        found += [
            (one.number, one.index, "end") if isinstance(one, End) else (one.number, one.index, one.change)
            for one in written
        ]
        position = CapturePosition.decode(position.encode())
        if not written and position.lsn >= log[-1][1]:
            break
    assert found == expected(log)


def test_another_history_is_recognised_in_the_middle_of_a_transaction() -> None:
    """Of a slot that was made again, the transaction that is half written does not come, or is another one."""
    half = CapturePosition(50, 7, 3)
    with pytest.raises(OtherHistory, match="is not sent any more"):
        Numbering[str](half).begin(Begin(60, 0, 1))
    shorter = Numbering[str](half)
    shorter.begin(Begin(50, 0, 1))
    shorter.change("only one")
    with pytest.raises(OtherHistory, match="has 1 events, and 3"):
        shorter.commit(Commit(50, 55))


def test_a_half_written_transaction_holds_the_position_until_it_comes() -> None:
    """The server may say that it has passed a place before it sends anything."""
    numbering = Numbering[str](CapturePosition(50, 7, 3))
    numbering.passed(1000)
    assert numbering.position is None
