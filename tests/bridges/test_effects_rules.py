"""The states of a side effect: the rules against a slow model, and what must hold under any schedule of workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.bridges.effects.rules import (
    ENDED,
    Effect,
    EffectRules,
    decide_claim,
    decide_done,
    decide_failure,
    decide_resolution,
)
from semel.errors import ConfigError, InvalidState

LEASE_MS, BACKOFF_MS, ATTEMPTS = 100, 40, 3

EVENTS = st.one_of(
    st.tuples(st.just("pass"), st.sampled_from([1, 39, 40, 80, 99, 100, 160])),
    st.tuples(st.just("claim"), st.sampled_from("abc")),
    st.tuples(st.just("done"), st.sampled_from("abc")),
    st.tuples(st.sampled_from(["open", "not done", "rejected"]), st.sampled_from("abc")),
    st.tuples(st.just("resolve"), st.booleans()),
)


@dataclass
class SlowModel:
    """Knows nothing of rows: it has everything that happened, and looks through all of it at each question."""

    takes_key: bool
    log: list[tuple[str, int, Any]] = field(default_factory=list[tuple[str, int, Any]])
    """(what, when, which claim). Claims are numbered from 1."""

    def claims(self) -> int:
        return sum(what == "claimed" for what, _, _ in self.log)

    def attempts(self) -> int:
        """Claims since a person last wanted another call."""
        since = max((n for n, (what, _, _) in enumerate(self.log) if what == "reopened"), default=-1)
        return sum(what == "claimed" for what, _, _ in self.log[since + 1 :])

    def last(self) -> tuple[str, int]:
        """The last thing that happened, and when."""
        return (self.log[-1][0], self.log[-1][1]) if self.log else ("nothing", 0)

    def state(self) -> str:
        names = {"nothing": None, "claimed": "claimed", "reopened": "failed", "confirmed": "done", "called off": "done"}
        what = self.last()[0]
        return names.get(what, what) or "nothing"

    def ask(self, now: int) -> str:
        """What a worker that claims is answered: "call", "wait" or "skip"."""
        what, when = self.last()
        if what == "nothing" or what == "reopened":
            return "call"
        if what == "failed":
            return "call" if now >= when + BACKOFF_MS * 2 ** (self.attempts() - 1) else "wait"
        if what == "claimed":
            if now < when + LEASE_MS:
                return "wait"
            return "call" if self.takes_key and self.attempts() < ATTEMPTS else "skip"
        return "skip"

    def claim(self, now: int) -> None:
        if self.ask(now) == "call":
            self.log.append(("claimed", now, self.claims() + 1))
        elif self.ask(now) == "skip" and self.last()[0] == "claimed":
            self.log.append(("unknown", now, None))

    def end(self, claim: int, how: str, now: int) -> bool:
        """A worker reports how its call ended; whether it is heard."""
        if claim != self.claims():
            return False
        state = self.state()
        if how == "done":
            if state in ("claimed", "unknown"):
                self.log.append(("confirmed", now, claim))
            return state in ("claimed", "unknown", "done")
        if state in ("failed", "dead"):
            return True
        if state == "unknown" and how != "open":
            self.log.append(("dead", now, claim))
        if state == "claimed":
            self.log.append((self._after(how), now, claim))
        return state in ("claimed", "unknown")

    def _after(self, how: str) -> str:
        if how == "rejected":
            return "dead"
        if not self.takes_key and how == "open":
            return "unknown"
        return "dead" if self.attempts() >= ATTEMPTS else "failed"

    def resolve(self, is_done: bool, now: int) -> None:
        self.log.append(("called off" if is_done else "reopened", now, None))


@settings(max_examples=500, deadline=None)
@given(st.booleans(), st.lists(EVENTS, max_size=40))
def test_the_rules_say_what_a_slow_model_says(takes_key: bool, events: list[tuple[str, Any]]) -> None:
    """F4: every answer and every state, for any order of claims, endings, resolutions and time passing."""
    rules = EffectRules(takes_key, ATTEMPTS, LEASE_MS, BACKOFF_MS, 10_000)
    model, effect, now = SlowModel(takes_key), None, 0
    held: dict[str, int] = {}
    for number, (what, which) in enumerate(events):
        if what == "pass":
            now += which
        elif what == "claim":
            expected = model.ask(now)
            decision = decide_claim(effect, "k", f"{which}{number}", now, rules)
            assert decision.action == expected
            model.claim(now)
            effect = decision.effect
            if decision.action == "call":
                held[which] = effect.epoch
        elif what == "resolve":
            if effect is not None and effect.state in ("unknown", "dead"):
                model.resolve(which, now)
                effect = decide_resolution(effect, which, now)
        elif which in held and effect is not None:
            epoch = held[which]
            if what == "done":
                after = decide_done(effect, epoch, now, None)
            else:
                after = decide_failure(effect, epoch, now, what, "no", rules, jitter=1.0)  # type: ignore[arg-type]
            assert (after is not None) == model.end(epoch, what, now)
            effect = after or effect
        assert (effect.state if effect is not None else "nothing") == model.state()


@dataclass
class Worker:
    """Makes real calls between its claim and its report, as slowly as the schedule wants."""

    epoch: int | None = None
    lease_end: int = 0
    was_carried_out: bool | None = None
    """None before its call."""


def report(effect: Effect, worker: Worker, what: str, now: int, rules: EffectRules) -> Effect | None:
    """A worker that has heard from the callee tells the truth; one that has not says that it is open."""
    assert worker.epoch is not None
    if what == "open":
        return decide_failure(effect, worker.epoch, now, "open", "no", rules, jitter=0.0)
    if worker.was_carried_out:
        return decide_done(effect, worker.epoch, now, None)
    return decide_failure(effect, worker.epoch, now, "not done", "no", rules, jitter=0.0)


STEPS = st.lists(
    st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from(["go", "go", "go", "crash", "open", "not done", "pass"])),
    max_size=60,
)


@settings(max_examples=500, deadline=None)
@given(st.booleans(), STEPS)
def test_no_schedule_of_workers_makes_a_call_that_may_repeat_a_key_that_is_not_taken(
    takes_key: bool, steps: list[tuple[int, str]]
) -> None:
    """F4: without the key at most one call that may have been carried out; never two within their leases."""
    rules = EffectRules(takes_key, 4, LEASE_MS, BACKOFF_MS, 10_000)
    workers = [Worker(), Worker(), Worker()]
    effect: Effect | None = None
    now = carried_out = 0
    for number, (which, what) in enumerate(steps):
        worker = workers[which]
        if what == "pass":
            now += 60
        elif what == "crash":
            workers[which] = Worker()
        elif worker.epoch is None:
            decision = decide_claim(effect, "k", f"{which}-{number}", now, rules)
            effect = decision.effect
            if decision.action == "call":
                worker.epoch, worker.lease_end = effect.epoch, effect.due_ms
        elif worker.was_carried_out is None:
            assert sum(one.epoch is not None and now < one.lease_end for one in workers) <= 1
            worker.was_carried_out = what != "not done"
            carried_out += worker.was_carried_out
        else:
            assert effect is not None
            after = report(effect, worker, "open" if what == "open" else "knows", now, rules)
            if after is None:
                assert effect.epoch > worker.epoch or effect.state == "done"
            assert effect.state != "done" or after in (None, effect)
            effect = after or effect
            workers[which] = Worker()
    if not takes_key:
        assert carried_out <= 1


def test_a_late_report_never_overwrites_the_claim_of_a_new_owner() -> None:
    """F4: a zombie that wakes up can neither confirm nor fail what another worker has claimed."""
    rules = EffectRules(takes_key=True)
    first = decide_claim(None, "k", "zombie", 0, rules).effect
    second = decide_claim(first, "k", "successor", rules.lease_ms, rules).effect
    assert (second.epoch, second.attempts, second.owner) == (2, 2, "successor")
    assert decide_done(second, first.epoch, rules.lease_ms, None) is None
    assert decide_failure(second, first.epoch, rules.lease_ms, "rejected", "no", rules, jitter=0.0) is None


def test_a_late_report_ends_the_doubt_where_nobody_has_called_again() -> None:
    """F4: the worker that was slow is the only one that knows whether its call was carried out."""
    rules = EffectRules(takes_key=False)
    first = decide_claim(None, "k", "slow", 0, rules).effect
    unknown = decide_claim(first, "k", "other", rules.lease_ms, rules).effect
    assert unknown.state == "unknown"
    done = decide_done(unknown, first.epoch, rules.lease_ms, "sent")
    assert done is not None
    assert (done.state, done.result) == ("done", "sent")


def test_back_off_doubles_up_to_its_limit_and_jitter_takes_away_at_most_half() -> None:
    """F4: many workers that failed together do not call again together."""
    rules = EffectRules(takes_key=True, backoff_ms=100, backoff_max_ms=1_000)
    assert [rules.back_off_ms(n, jitter=1.0) for n in range(1, 7)] == [100, 200, 400, 800, 1_000, 1_000]
    assert [rules.back_off_ms(n, jitter=0.0) for n in range(1, 4)] == [50, 100, 200]
    assert rules.back_off_ms(10_000, jitter=1.0) == 1_000


def test_only_what_is_unknown_or_dead_can_be_resolved() -> None:
    """F4: a person cannot call off a call that is under way."""
    claimed = decide_claim(None, "k", "a", 0, EffectRules(takes_key=False)).effect
    with pytest.raises(InvalidState, match="is claimed: only one that is unknown or dead"):
        decide_resolution(claimed, True, 1)


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"lease_ms": 0}, {"backoff_ms": 5, "backoff_max_ms": 4}])
def test_rules_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    """K3: before any call is made."""
    with pytest.raises(ConfigError):
        EffectRules(takes_key=True, **wrong)


def test_effects_that_have_ended_are_never_called() -> None:
    """F4: a record that comes again after its effect ended makes no call."""
    first = decide_claim(None, "k", "a", 0, EffectRules(takes_key=True)).effect
    for state in ENDED:
        ended = Effect(**{**{name: getattr(first, name) for name in Effect.__slots__}, "state": state})
        assert decide_claim(ended, "k", "b", 10**9, EffectRules(takes_key=True)).action == "skip"
