"""Which fault comes when: made from a seed alone, the same to the byte each time, and kept as JSON for another run.

Nothing here touches a clock, a process or a socket. Each kind draws from a stream of its own, so that leaving one out
does not change what the others want to do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeVar

from semel.errors import ConfigError
from semel.verify.faults.kinds import PROXY_KINDS, FaultKind, LeftOut

FORMAT: Final = 2
T = TypeVar("T")

BROKERS_LANE: Final = "brokers"
"""Faults that take a broker away come one at a time over all brokers: the clients must get work done in between."""

Detail = str | int | bool | None


@dataclass(frozen=True, slots=True)
class Worker:
    """A client process that faults can be done to, by the name its supervisor knows."""

    name: str
    transactional_ids: tuple[str, ...] = ()
    client_id: str | None = None
    """What its requests say; None if that is not known, and then no fault is meant for it alone."""
    may_have_transactions: bool = False
    """Its transactional ids are not known, but it may have some, or be a member of a group."""
    is_alone: bool = False
    """Every request that comes by is its own, whatever its client id."""

    def __post_init__(self) -> None:
        if "," in self.name:
            raise ValueError(f"a worker's name has no comma: {self.name!r}")


@dataclass(frozen=True, slots=True)
class Cast:
    """Who is there. `longest_timeout_ms` is the longest session or transaction time-out of any client."""

    brokers: int = 1
    workers: tuple[Worker, ...] = ()
    longest_timeout_ms: int = 10_000
    restart_ms: int = 1_000
    """How long a broker takes to start; clients are given as much time again afterwards."""
    can_pause_brokers: bool = True
    """Whether brokers can be paused: those of somebody else cannot."""
    apis: tuple[str, ...] = ()
    """The requests that the workers make, by name of `semel.wire.Api`; () for those of a transactional copier."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: from `at_ms` on, counted from the start of the run, for `for_ms`. What it needs is in `details`."""

    number: int
    at_ms: int
    kind: FaultKind
    for_ms: int = 0
    details: Mapping[str, Detail] = field(default_factory=dict[str, Detail])

    @property
    def lanes(self) -> tuple[str, ...]:
        """What it has for itself while it lasts: faults that share a lane do not overlap."""
        broker, workers = self.details.get("broker"), str(self.details.get("workers") or "")
        return ((BROKERS_LANE,) if broker is not None else ()) + tuple(name for name in workers.split(",") if name)

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "at_ms": self.at_ms,
            "kind": self.kind.value,
            "for_ms": self.for_ms,
            "details": dict(self.details),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        return cls(fields["number"], fields["at_ms"], FaultKind(fields["kind"]), fields["for_ms"], fields["details"])


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a run in the order of their time.

    >>> plan = make_plan(7, {FaultKind.KILL: 4}, 60_000, Cast())
    >>> plan == FaultPlan.from_json(plan.to_json()) == make_plan(7, {FaultKind.KILL: 4}, 60_000, Cast())
    True
    """

    seed: int
    duration_ms: int
    faults: tuple[Fault, ...] = ()
    left_out: tuple[LeftOut, ...] = ()

    def to_json(self) -> str:
        """One line for each fault."""
        head = {
            "format": FORMAT,
            "seed": self.seed,
            "duration_ms": self.duration_ms,
            "left_out": {one.kind.value: one.reason for one in self.left_out},
        }
        lines = ",\n".join(json.dumps(fault.to_json(), sort_keys=True) for fault in self.faults)
        return f'{json.dumps(head)[:-1]}, "faults": [\n{lines}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> Self:
        try:
            fields = json.loads(text)
            if fields["format"] != FORMAT:
                raise ConfigError(f"The fault plan has format {fields['format']}, and this version reads {FORMAT}.")
            return cls(
                fields["seed"],
                fields["duration_ms"],
                tuple(Fault.from_json(one) for one in fields["faults"]),
                tuple(LeftOut(FaultKind(kind), reason) for kind, reason in fields["left_out"].items()),
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"This is no fault plan, so nothing was started: {error!r}.") from error

    @classmethod
    def from_records(cls, lines: Iterable[str], *, seed: int = 0) -> Self:
        """What a driver has recorded, as a plan: only what was carried out, and at the times when it really was.

        What waits for a request keeps its time, from which on requests are counted.
        """
        faults: list[Fault] = []
        for one in (json.loads(line) for line in lines if line.strip()):
            if one["outcome"] == "done":
                fault = Fault.from_json(one)
                began_ms = (one["begin_ns"] - one["start_ns"]) // 1_000_000
                faults.append(fault if fault.kind in PROXY_KINDS else replace(fault, at_ms=began_ms))
        faults.sort(key=lambda fault: (fault.at_ms, fault.number))
        return cls(seed, max((one.at_ms + one.for_ms for one in faults), default=0), tuple(faults))

    def renamed(self, apis: Mapping[str, str]) -> Self:
        """The same plan for clients that make other requests for the same steps."""

        def moved(details: Mapping[str, Detail]) -> dict[str, Detail]:
            return {
                name: apis.get(str(value), value) if name in ("api", "overtaker") else value
                for name, value in details.items()
            }

        return replace(self, faults=tuple(replace(one, details=moved(one.details)) for one in self.faults))

    def counts(self) -> dict[FaultKind, int]:
        """How many of each kind."""
        found: dict[FaultKind, int] = {}
        for fault in self.faults:
            found[fault.kind] = found.get(fault.kind, 0) + 1
        return found


def make_plan(
    seed: int,
    rates: Mapping[FaultKind, float],
    duration_ms: int,
    cast: Cast,
    *,
    left_out: Sequence[LeftOut] = (),
) -> FaultPlan:
    """The faults of a run: about `rates` a minute of each kind, over by `duration_ms`, none where nobody can have it.

    `Chosen` has rates and what is left out already; what nobody in `cast` can have is added to the latter.
    """
    wanted: list[Fault] = []
    without = list(left_out)
    for kind in FaultKind:
        if kind not in rates:
            continue
        if reason := _why_nobody(kind, cast):
            without.append(LeftOut(kind, reason))
            continue
        # Only random() is promised to be the same in every Python; all draws are made from it.
        chance = _Chance(random.Random(f"{seed}/{kind.value}"))
        wanted += (_draw(kind, at_ms, chance, cast) for at_ms in _times(rates[kind], duration_ms, chance))
    wanted.sort(key=lambda fault: (fault.at_ms, fault.kind))
    return FaultPlan(seed, duration_ms, tuple(_laid_out(wanted, duration_ms, cast)), tuple(without))


def _why_nobody(kind: FaultKind, cast: Cast) -> str | None:
    if kind in (FaultKind.WORKER_KILL, FaultKind.WORKER_PAUSE) and not cast.workers:
        return "there are no worker processes"
    if kind is FaultKind.CRASH and not any(map(_can_crash, cast.workers)):
        return "no worker process is known by its requests"
    if kind is FaultKind.STORM and not cast.workers and not cast.can_pause_brokers:
        return "there is nobody to stop: no worker processes, and the brokers are somebody else's"
    if kind is FaultKind.HIJACK and not any(worker.transactional_ids for worker in cast.workers):
        return "no client's transactional.id is known"
    if kind is FaultKind.ZOMBIE and not any(map(_can_be_given_up, cast.workers)):
        return "no client has a transactional.id"
    return None


def _can_crash(worker: Worker) -> bool:
    return worker.client_id is not None or worker.is_alone


def _can_be_given_up(worker: Worker) -> bool:
    return bool(worker.transactional_ids) or worker.may_have_transactions


class _Chance:
    """Draws from one stream, by `random()` alone."""

    def __init__(self, source: random.Random) -> None:
        self._next = source.random
        self._deck: list[object] = []

    def whole(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return low + int(self._next() * (high - low + 1))

    def one_of(self, choices: Sequence[T]) -> T:
        return choices[self.whole(0, len(choices) - 1)]

    def dealt(self, cards: Sequence[T]) -> T:
        """One after the other in random order, and again when all were dealt: each comes even if few are drawn."""
        if not self._deck:
            rest = list(cards)
            self._deck = [rest.pop(self.whole(0, len(rest) - 1)) for _ in cards]
        return self._deck.pop()  # type: ignore[return-value]  # a stream deals from one set of cards only

    def is_under(self, share: float) -> bool:
        return self._next() < share

    def within(self) -> float:
        return self._next()


def _times(per_minute: float, duration_ms: int, chance: _Chance) -> list[int]:
    """Evenly many per time, each at random within its share: a short run gets one of each kind too."""
    expected = per_minute * duration_ms / 60_000
    count = max(1, int(expected) + chance.is_under(expected - int(expected)))
    return [int((number + chance.within()) * duration_ms / count) for number in range(count)]


def _laid_out(wanted: Iterable[Fault], duration_ms: int, cast: Cast) -> Iterable[Fault]:
    """Move each fault behind those it cannot overlap with; who has no room before the end is dropped."""
    free_from_ms: dict[str, int] = {}
    laid: list[Fault] = []
    for fault in wanted:
        at_ms = max(fault.at_ms, *(free_from_ms.get(lane, 0) for lane in fault.lanes), 0)
        away_ms = fault.for_ms + (cast.restart_ms if fault.kind in (FaultKind.KILL, FaultKind.RESTART) else 0)
        if at_ms + away_ms > duration_ms:
            continue
        for lane in fault.lanes:
            free_from_ms[lane] = at_ms + 2 * away_ms  # as long as it was away it is left in peace
        laid.append(replace(fault, at_ms=at_ms))
    laid.sort(key=lambda fault: (fault.at_ms, fault.kind))
    return [replace(fault, number=number) for number, fault in enumerate(laid)]


# -- what a fault is in detail -----------------------------------------------------------------------------------------

REQUESTS: Final[Mapping[str, int]] = {
    "END_TXN": 5,
    "PRODUCE": 5,
    "TXN_OFFSET_COMMIT": 3,
    "ADD_PARTITIONS_TO_TXN": 2,
    "ADD_OFFSETS_TO_TXN": 1,
    "INIT_PRODUCER_ID": 2,
    "FIND_COORDINATOR": 1,
    "FETCH": 3,
    "OFFSET_FETCH": 1,
    "METADATA": 1,
    "JOIN_GROUP": 1,
    "SYNC_GROUP": 1,
    "HEARTBEAT": 1,
    "OFFSET_COMMIT": 3,
}
"""How likely each request is to be met, where the workers make it. The end of a transaction matters most."""
GROUP_REQUESTS: Final = frozenset({"JOIN_GROUP", "SYNC_GROUP", "HEARTBEAT"})
POSITION_REQUESTS: Final = frozenset({"TXN_OFFSET_COMMIT", "ADD_OFFSETS_TO_TXN", "OFFSET_FETCH", "OFFSET_COMMIT"})
PROTOCOL_1_REQUESTS: Final = frozenset({"ADD_PARTITIONS_TO_TXN", "ADD_OFFSETS_TO_TXN"})
_OF_A_TRANSACTIONAL_COPIER: Final = frozenset(REQUESTS) - {"OFFSET_COMMIT"}
# Who dies here has done one step of its work and not the next.
_STEPS: Final = ("END_TXN", "PRODUCE", "TXN_OFFSET_COMMIT", "OFFSET_COMMIT")
# A second InitProducerId fences its own client by right, which is what the kind "hijack" does on purpose.
_REPEATABLE: Final = ("END_TXN", "PRODUCE", "TXN_OFFSET_COMMIT", "ADD_PARTITIONS_TO_TXN", "ADD_OFFSETS_TO_TXN")
_OVERTAKERS: Final = ("PRODUCE", "END_TXN", "FETCH", "TXN_OFFSET_COMMIT")


def _draw(kind: FaultKind, at_ms: int, chance: _Chance, cast: Cast) -> Fault:
    for_ms, details = _DRAWS[kind](chance, cast)
    return Fault(0, at_ms, kind, for_ms, details)


_Drawn = tuple[int, dict[str, Detail]]


def _some_broker(chance: _Chance, cast: Cast) -> dict[str, Detail]:
    return {"broker": chance.whole(0, cast.brokers - 1)}


def _some_worker(chance: _Chance, cast: Cast) -> dict[str, Detail]:
    return {"workers": chance.one_of(cast.workers).name}


def _kill(chance: _Chance, cast: Cast) -> _Drawn:
    return chance.whole(0, 1_000), _some_broker(chance, cast)


def _pause(chance: _Chance, cast: Cast) -> _Drawn:
    return chance.whole(100, 2_000), _some_broker(chance, cast)


def _disk(chance: _Chance, cast: Cast) -> _Drawn:
    # Often a little still fits, so that a batch is cut in its middle.
    free_bytes = chance.whole(1, 200) if chance.is_under(0.7) else 0
    return chance.whole(500, 3_000), {**_some_broker(chance, cast), "free_bytes": free_bytes}


def _clock(chance: _Chance, cast: Cast) -> _Drawn:
    ahead_ms = cast.longest_timeout_ms + chance.whole(1_000, cast.longest_timeout_ms + 1_000)
    jump_ms = ahead_ms if chance.is_under(0.75) else -chance.whole(100, 2_000)
    return 0, {**_some_broker(chance, cast), "jump_ms": jump_ms}


def _storm(chance: _Chance, cast: Cast) -> _Drawn:
    for_ms = cast.longest_timeout_ms + chance.whole(500, 2_000)
    names = ",".join(worker.name for worker in cast.workers)
    stops_workers = bool(names) and (not cast.can_pause_brokers or chance.is_under(0.5))
    return for_ms, {"workers": names} if stops_workers else _some_broker(chance, cast)


def _worker_kill(chance: _Chance, cast: Cast) -> _Drawn:
    return chance.whole(0, 500), _some_worker(chance, cast)


def _worker_pause(chance: _Chance, cast: Cast) -> _Drawn:
    return chance.whole(100, 2_000), _some_worker(chance, cast)


def _crash(chance: _Chance, cast: Cast) -> _Drawn:
    victim = chance.one_of([worker for worker in cast.workers if _can_crash(worker)])
    known = cast.apis or _OF_A_TRANSACTIONAL_COPIER
    steps = [name for name in _STEPS if name in known] or list(_STEPS)
    api, when = chance.dealt([(api, when) for api in steps for when in ("before", "after")])
    met = {"api": api, "client_id": victim.client_id, "nth": chance.whole(1, 3)}
    return chance.whole(0, 500), {**met, "victim": victim.name, "when": when}


def _zombie(chance: _Chance, cast: Cast) -> _Drawn:
    # Only who has a transaction, or a place in a group, has something to lose in its sleep.
    sleepers = [worker for worker in cast.workers if _can_be_given_up(worker)]
    return cast.longest_timeout_ms + chance.whole(200, 1_000), {"workers": chance.one_of(sleepers).name}


def _hijack(chance: _Chance, cast: Cast) -> _Drawn:
    ids = [one for worker in cast.workers for one in worker.transactional_ids]
    keeps_epoch = chance.is_under(0.5)
    details: dict[str, Detail] = {"transactional_id": chance.one_of(ids), "keeps_epoch": keeps_epoch}
    return chance.whole(0, 2_000) if keeps_epoch else 0, details


def _frame(chance: _Chance, cast: Cast, requests: Iterable[str] = REQUESTS) -> dict[str, Detail]:
    known = cast.apis or _OF_A_TRANSACTIONAL_COPIER
    names = [name for name in requests if name in known] or list(requests)
    weighted = [name for name in names for _ in range(REQUESTS[name])]
    clients = [worker.client_id for worker in cast.workers if worker.client_id is not None]
    client_id = chance.one_of(clients) if clients and chance.is_under(0.5) else None
    return {"api": chance.one_of(weighted), "client_id": client_id, "nth": chance.whole(1, 3)}


def _cut(chance: _Chance, cast: Cast) -> _Drawn:
    where = {"direction": chance.one_of(("request", "response")), "when": chance.one_of(("before", "after"))}
    return 0, {**_frame(chance, cast), **where}


def _delay(chance: _Chance, cast: Cast) -> _Drawn:
    for_ms = chance.whole(20, 500) if chance.is_under(0.5) else chance.whole(500, 5_000)
    return for_ms, {**_frame(chance, cast), "direction": chance.one_of(("request", "response"))}


def _silence(chance: _Chance, cast: Cast) -> _Drawn:
    return 0, {**_frame(chance, cast), "direction": "response"}


def _repeat(chance: _Chance, cast: Cast) -> _Drawn:
    return chance.whole(0, 3_000), _frame(chance, cast, _REPEATABLE)


def _reorder(chance: _Chance, cast: Cast) -> _Drawn:
    overtakers = [name for name in _OVERTAKERS if not cast.apis or name in cast.apis] or list(_OVERTAKERS)
    return chance.whole(200, 2_000), {**_frame(chance, cast, _REPEATABLE), "overtaker": chance.one_of(overtakers)}


def _late(chance: _Chance, cast: Cast) -> _Drawn:
    clients = [worker.client_id for worker in cast.workers if worker.transactional_ids and worker.client_id is not None]
    client_id = chance.one_of(clients) if clients else None
    return chance.whole(1_000, 3_000), {"api": "END_TXN", "client_id": client_id, "nth": chance.whole(1, 3)}


_DRAWS: Final[Mapping[FaultKind, Callable[[_Chance, Cast], _Drawn]]] = {
    FaultKind.KILL: _kill,
    FaultKind.RESTART: _kill,
    FaultKind.PAUSE: _pause,
    FaultKind.DISK: _disk,
    FaultKind.CLOCK: _clock,
    FaultKind.STORM: _storm,
    FaultKind.WORKER_KILL: _worker_kill,
    FaultKind.WORKER_PAUSE: _worker_pause,
    FaultKind.ZOMBIE: _zombie,
    FaultKind.CRASH: _crash,
    FaultKind.HIJACK: _hijack,
    FaultKind.CUT: _cut,
    FaultKind.DELAY: _delay,
    FaultKind.SILENCE: _silence,
    FaultKind.REPEAT: _repeat,
    FaultKind.REORDER: _reorder,
    FaultKind.LATE: _late,
}
