"""The course of a block and of its recovery, by the real code, in thousands of seeded worlds in memory."""

from __future__ import annotations

import os

import pytest
from simulated_both import World
from simulated_kafka import SimulatedProducer

from semel.bridges.both import course, recovery
from semel.bridges.both.decision import Decision
from semel.bridges.both.kafka_side import KafkaSide
from semel.bridges.both.recovery import Step
from semel.bridges.both.store import Store

SEEDS = int(os.environ.get("SEMEL_BOTH_SEEDS", "500"))
FIRST = int(os.environ.get("SEMEL_SEED", "1"))


def run(seed: int, protocol: int, *, two_phase: bool = False) -> World:
    world = World(seed, protocol, two_phase=two_phase)
    for _ in range(world.rng.randint(1, 4)):
        world.live()
    world.end_in_peace()
    return world


@pytest.mark.parametrize("protocol", [1, 2])
def test_an_outsider_finds_no_difference_in_any_seed(protocol: int) -> None:
    """G5: no record without its row at any time; at the end the same orders in the same order."""
    seen: set[str] = set()
    by_hand: set[Step | None] = set()
    for seed in range(FIRST, FIRST + SEEDS):
        world = run(seed, protocol)
        told = "\n".join(world.events)
        assert world.verdict() == [], f"seed {seed}, protocol {protocol}:\n{told}"
        seen |= {event.strip().split(":")[0].split(" at ")[0] for event in world.events}
        by_hand |= world.by_hand
    # What never happened proves nothing.
    assert {"crash", "timeout", "pause", "wakes", "commit", "database commit", "end", "reopen"} <= seen
    assert {Step.DELETE, Step.RESEND, None} <= by_hand


def test_an_outsider_finds_no_difference_with_two_phase_commit_either() -> None:
    """G5 with KIP-939: the timeout goes away, so what was decided is committed as it is and never sent again."""
    seen: set[str] = set()
    by_hand: set[Step | None] = set()
    for seed in range(FIRST, FIRST + SEEDS):
        world = run(seed, 2, two_phase=True)
        told = "\n".join(world.events)
        assert world.verdict() == [], f"seed {seed}, two-phase commit:\n{told}"
        seen |= {event.strip().split(":")[0].split(" at ")[0] for event in world.events}
        by_hand |= world.by_hand
    assert {"crash", "pause", "wakes", "commit", "database commit", "end prepared"} <= seen
    assert {Step.DELETE, Step.TAKE_OVER, None} <= by_hand


@pytest.mark.parametrize(
    "bug",
    ["deletes on any refusal", "resends on any refusal", "resends without a decision", "ends before the database"],
)
def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the mistakes that this is about is seen within some hundred seeds."""
    plant(bug, monkeypatch)
    found = 0
    for seed in range(FIRST, FIRST + 400):
        world = run(seed, 1 + seed % 2)
        found += bool(world.verdict())
    assert found > 0


def test_a_prepared_transaction_that_nobody_decided_must_not_be_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake that two-phase commit makes possible is seen too."""
    right = SimulatedProducer.end_prepared

    def commit_anyway(self: SimulatedProducer, decision: Decision | None) -> bool:
        if decision is None and self.prepared is not None:
            self.identity, self.prepared = self.kafka.end(self.identity, 2, commit=True), None
        return right(self, decision)

    monkeypatch.setattr(SimulatedProducer, "end_prepared", commit_anyway)
    assert any(run(seed, 2, two_phase=True).verdict() for seed in range(FIRST, FIRST + 400))


def plant(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bug in ("deletes on any refusal", "resends on any refusal"):
        wrong = Step.DELETE if bug.startswith("deletes") else Step.RESEND
        right = recovery.decide_step

        def decide(decision: Decision, seen: recovery.Seen) -> Step:
            step = right(decision, seen)
            return wrong if step is Step.READ_MARKERS else step

        monkeypatch.setattr(course, "decide_step", decide)
    elif bug == "resends without a decision":
        monkeypatch.setattr("simulated_database.SimulatedStore.decide_again", lambda *_: None)
    else:
        original = course._write

        def write(store: Store, kafka: KafkaSide, *rest: object) -> Decision:
            decision = original(store, kafka, *rest)  # type: ignore[arg-type]
            kafka.commit()
            return decision

        monkeypatch.setattr(course, "_write", write)
