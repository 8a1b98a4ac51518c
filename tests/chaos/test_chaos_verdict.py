"""The verdict of a chaos run on histories written by hand: each promise that is broken is seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from semel.verify import chaos_verdict as verdict
from semel.verify.chaos_clients import COMPACTED, COPIED, INPUT, RETAINED
from semel.verify.chaos_ledger import Fate, Ledger, Violation
from semel.verify.chaos_reading import Records


def history() -> tuple[Ledger, Records]:
    """Everything in it is right."""
    ledger = Ledger()
    for name, fate in (("one", Fate.COMMITTED), ("two", Fate.ABORTED), ("three", Fate.UNKNOWN), ("four", Fate.UNKNOWN)):
        transaction = ledger.begin(name)
        transaction.values.update({f"{name}/0": ("a", 0), f"{name}/1": ("b", 0)})
        ledger.end(name, transaction, fate)
    for value, where, key in (
        ("plain/1", (INPUT, 0), None),
        ("plain/2", (INPUT, 0), None),
        ("plain/3", (COMPACTED, 0), "key"),
        ("plain/4", (COMPACTED, 0), "key"),
        ("plain/5", (RETAINED, 0), None),
        ("plain/6", (RETAINED, 0), None),
        ("plain/7", (RETAINED, 0), None),
    ):
        ledger.send(value, where, key)
        ledger.acknowledge("plain", value, where, 0)
    records: Records = {
        ("a", 0): [(0, "one/0"), (5, "three/0")],
        ("b", 0): [(0, "one/1"), (5, "three/1")],
        (INPUT, 0): [(0, "plain/1"), (1, "plain/2")],
        (COPIED, 0): [(0, "plain/1"), (2, "plain/2")],
        (COMPACTED, 0): [(1, "plain/4")],
        (RETAINED, 0): [(1, "plain/6"), (2, "plain/7")],
    }
    return ledger, records


def test_a_history_in_which_all_is_right_passes() -> None:
    """An unknown transaction may be there or not; retention and compaction may take what they take."""
    verdict.check_everything(*history())


def _lose(where: tuple[str, int], number: int) -> Callable[[Ledger, Records], None]:
    def change(ledger: Ledger, records: Records) -> None:
        del records[where][number]

    return change


def _add(where: tuple[str, int], value: str) -> Callable[[Ledger, Records], None]:
    def change(ledger: Ledger, records: Records) -> None:
        records[where].append((99, value))

    return change


def _swap_copies(ledger: Ledger, records: Records) -> None:
    records[COPIED, 0].reverse()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (_lose(("a", 0), 0), "committed by one, and lost: .'one/0'"),
        (_lose(("b", 0), 1), "half a transaction of three"),
        (_add(("a", 0), "two/0"), "aborted by two, and visible"),
        (_add(("a", 0), "four/0"), "half a transaction of four"),
        (_add(("a", 0), "one/0"), "twice in a-0"),
        (_add(("a", 0), "one/1"), "was sent to"),
        (_add(("a", 0), "from nowhere"), "was sent to None"),
        (_lose((INPUT, 0), 0), "plain/1 was acknowledged"),
        (_lose((COPIED, 0), 1), "1 lost, 0 more"),
        (_swap_copies, "is not the same"),
        (_lose((COMPACTED, 0), 0), "the last value of key is gone"),
        (_lose((RETAINED, 0), 1), "plain/7 was acknowledged"),
    ],
)
def test_a_broken_promise_is_seen(change: Callable[[Ledger, Records], None], complaint: str) -> None:
    """A verdict that cannot be guilty proves nothing."""
    ledger, records = history()
    change(ledger, records)
    with pytest.raises(Violation, match=complaint):
        verdict.check_everything(ledger, records)


def test_a_log_that_ends_too_early_and_a_reader_that_saw_too_much_are_seen() -> None:
    """The two checks that are made while the run goes on."""
    verdict.check_ends({("a", 0): 3}, {("a", 0): 3})
    with pytest.raises(Violation, match="ends at 2, but offset 2 was acknowledged"):
        verdict.check_ends({("a", 0): 3}, {("a", 0): 2})
    records: Records = {("a", 0): [(0, "one"), (2, "two")]}
    verdict.check_reader({("a", 0): [(0, "one")]}, records)
    with pytest.raises(Violation, match=r"got \(1, 'three'\)"):
        verdict.check_reader({("a", 0): [(0, "one"), (1, "three")]}, records)
    with pytest.raises(Violation, match="position in a-0 is 2, not 3"):
        verdict.check_positions({("a", 0): 2}, records)


def test_topics_that_were_promised_and_topics_that_came_back_are_seen() -> None:
    """Only an answered request is a promise."""
    ledger = Ledger()
    for name, state in (("x", "there"), ("y", "gone"), ("z", "going")):
        ledger.note_topic("maker", name, state)
    verdict.check_topics(ledger, ["x"])
    with pytest.raises(Violation, match="x was created, and is gone"):
        verdict.check_topics(ledger, ["z"])
    with pytest.raises(Violation, match="y was deleted, and is there"):
        verdict.check_topics(ledger, ["x", "y"])
