"""The states of a side effect, and every step from one to the next. Pure: values in, values out.

| from          | event                                              | to                                 |
|---------------|----------------------------------------------------|------------------------------------|
| nothing       | a worker claims it                                 | claimed                            |
| failed        | a worker claims it after the back-off              | claimed                            |
| claimed       | the call returned                                  | done                               |
| claimed       | the call raised, and may be made again             | failed; last attempt: dead         |
| claimed       | the call raised, and nobody knows what it did      | unknown                            |
| claimed       | the callee rejected it                             | dead                               |
| claimed       | the lease passed, the callee takes the key         | claimed again; last attempt: unknown |
| claimed       | the lease passed, the callee does not take the key | unknown                            |
| unknown       | the late worker reports after all                  | done, dead, or still unknown       |
| unknown, dead | a person decides                                   | done, or failed with no attempts   |
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from semel.errors import ConfigError, InvalidState

EffectState = Literal["claimed", "done", "failed", "dead", "unknown"]
ENDED: Final[frozenset[EffectState]] = frozenset({"done", "dead", "unknown"})
"""No worker makes a call in these states."""

Failure = Literal["open", "not done", "rejected"]
"""What is known of a call that raised: "open" means that it may have been carried out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One row of the table `semel_effects`. Times are in milliseconds since 1970, by the database's clock."""

    key: str
    state: EffectState
    attempts: int
    """How many calls were claimed. 0 if a person has asked for the call to be made again."""
    epoch: int
    """One more with each claim. Only the worker that holds this number may say how the call ended."""
    owner: str
    """The process of the last claim, for people, and a number that tells claims apart."""
    changed_ms: int
    due_ms: int
    """If claimed, when the lease ends; if failed, when the next attempt may begin."""
    error: str | None = None
    result: str | None = None
    is_reported: bool = False
    """A dead letter for it is in its topic."""
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


@dataclass(frozen=True, slots=True)
class EffectRules:
    """What the user has decided for all effects of one name.

    >>> EffectRules(takes_key=True).back_off_ms(3, jitter=1.0)
    4000
    """

    takes_key: bool
    attempts: int = 5
    lease_ms: int = 60_000
    backoff_ms: int = 1_000
    backoff_max_ms: int = 60_000

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"attempts={self.attempts} would never make a call: write 1 or more.")
        if self.lease_ms < 1 or self.backoff_ms < 0 or self.backoff_max_ms < self.backoff_ms:
            raise ConfigError("lease_s must be positive, backoff_s not negative, and backoff_max_s at least backoff_s.")

    def back_off_ms(self, attempt: int, *, jitter: float) -> int:
        """How long to wait after this attempt: doubled each time; `jitter` from 0 to 1 takes away up to half of it."""
        longest = min(self.backoff_max_ms, self.backoff_ms * 2 ** min(attempt - 1, 32))
        return round(longest * (0.5 + 0.5 * jitter))


@dataclass(frozen=True, slots=True)
class ClaimDecision:
    """What a worker that asks for an effect may do, and the row as it is from then on."""

    action: Literal["call", "wait", "skip"]
    effect: Effect


def decide_claim(effect: Effect | None, key: str, owner: str, now_ms: int, rules: EffectRules) -> ClaimDecision:
    """Whether this worker may make the call.

    >>> rules = EffectRules(takes_key=False)
    >>> first = decide_claim(None, "invoice-17", "a", 0, rules)
    >>> first.action, first.effect.state
    ('call', 'claimed')
    >>> decide_claim(first.effect, "invoice-17", "b", 59_999, rules).action
    'wait'
    >>> late = decide_claim(first.effect, "invoice-17", "b", 60_000, rules)
    >>> late.action, late.effect.state
    ('skip', 'unknown')
    """
    if effect is None:
        nothing = Effect(key=key, state="failed", attempts=0, epoch=0, owner=owner, changed_ms=now_ms, due_ms=now_ms)
        return _call(nothing, owner, now_ms, rules)
    if effect.state in ENDED:
        return ClaimDecision("skip", effect)
    if effect.state == "claimed" and effect.owner == owner:
        # The commit of this very claim was not confirmed, or its lease is used up before the call: none was made.
        return ClaimDecision("call", replace(effect, changed_ms=now_ms, due_ms=now_ms + rules.lease_ms))
    if now_ms < effect.due_ms:
        return ClaimDecision("wait", effect)
    if effect.state == "claimed" and not (rules.takes_key and effect.attempts < rules.attempts):
        lost = "The worker that claimed it did not report in time: nobody knows whether the call was made."
        return ClaimDecision("skip", replace(effect, state="unknown", changed_ms=now_ms, error=effect.error or lost))
    if effect.attempts >= rules.attempts:  # fewer attempts are allowed now than when it failed
        return ClaimDecision("skip", replace(effect, state="dead", changed_ms=now_ms))
    return _call(effect, owner, now_ms, rules)


def _call(effect: Effect, owner: str, now_ms: int, rules: EffectRules) -> ClaimDecision:
    claimed = replace(
        effect,
        state="claimed",
        attempts=effect.attempts + 1,
        epoch=effect.epoch + 1,
        owner=owner,
        changed_ms=now_ms,
        due_ms=now_ms + rules.lease_ms,
    )
    return ClaimDecision("call", claimed)


def decide_done(effect: Effect, epoch: int, now_ms: int, result: str | None) -> Effect | None:
    """The row after the call of this epoch returned; None if another worker has claimed the effect since.

    A worker that is late may still turn "unknown" into "done": it is the only one that knows.
    """
    if effect.epoch != epoch or effect.state not in ("claimed", "unknown", "done"):
        return None
    if effect.state == "done":  # this confirmation was committed before, and its answer was lost
        return effect
    return replace(effect, state="done", changed_ms=now_ms, error=None, result=result)


def decide_failure(
    effect: Effect, epoch: int, now_ms: int, failure: Failure, error: str, rules: EffectRules, *, jitter: float
) -> Effect | None:
    """The row after the call of this epoch raised; None if another worker has claimed the effect since."""
    if effect.epoch != epoch or effect.state == "done":
        return None
    if effect.state in ("failed", "dead"):  # this was committed before, and its answer was lost
        return effect
    known = replace(effect, changed_ms=now_ms, error=error)
    may_repeat = rules.takes_key or failure == "not done"
    if effect.state == "unknown":  # nobody waits for it any more, so it is not tried again
        return known if failure == "open" else replace(known, state="dead")
    if failure == "rejected" or (may_repeat and effect.attempts >= rules.attempts):
        return replace(known, state="dead")
    if not may_repeat:
        return replace(known, state="unknown")
    return replace(known, state="failed", due_ms=now_ms + rules.back_off_ms(effect.attempts, jitter=jitter))


def decide_resolution(effect: Effect, is_done: bool, now_ms: int) -> Effect:
    """The row after a person has decided what became of an effect that is unknown or dead."""
    if effect.state not in ("unknown", "dead"):
        raise InvalidState(
            f"Effect {effect.key!r} is {effect.state}: only one that is unknown or dead can be resolved. Nothing was "
            "changed."
        )
    if is_done:
        return replace(effect, state="done", changed_ms=now_ms)
    return replace(effect, state="failed", attempts=0, changed_ms=now_ms, due_ms=now_ms, is_reported=False)
