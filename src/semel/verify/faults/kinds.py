"""The kinds of faults: their names, what each does, how often it comes, and which of them a run can have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from semel.errors import ConfigError


class FaultKind(StrEnum):
    """The value is the name on the command line."""

    KILL = "kill"
    RESTART = "restart"
    PAUSE = "pause"
    DISK = "disk"
    CLOCK = "clock"
    STORM = "storm"
    WORKER_KILL = "worker-kill"
    WORKER_PAUSE = "worker-pause"
    ZOMBIE = "zombie"
    CRASH = "crash"
    HIJACK = "hijack"
    CUT = "cut"
    DELAY = "delay"
    SILENCE = "silence"
    REPEAT = "repeat"
    REORDER = "reorder"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class About:
    """`per_minute` is how often it comes unless the user says otherwise."""

    what: str
    per_minute: float


ABOUT: Final[Mapping[FaultKind, About]] = {
    FaultKind.KILL: About("a broker is killed (SIGKILL) and started again", 4),
    FaultKind.RESTART: About("a broker is stopped in order and started again", 1),
    FaultKind.PAUSE: About("a broker stands still (SIGSTOP) for up to two seconds", 3),
    FaultKind.DISK: About("a broker's disk is full for a while", 1.5),
    FaultKind.CLOCK: About("a broker's clock jumps, mostly ahead and past every time-out", 1),
    FaultKind.STORM: About("all workers, or a broker, stand still for longer than every time-out", 0.7),
    FaultKind.WORKER_KILL: About("a worker is killed (SIGKILL) and started again", 4),
    FaultKind.WORKER_PAUSE: About("a worker stands still (SIGSTOP) for up to two seconds", 3),
    FaultKind.ZOMBIE: About("a worker sleeps past every time-out, and wakes up when it was given up", 0.7),
    FaultKind.CRASH: About("a worker is killed (SIGKILL) with a request of its on the way, which arrives or not", 4),
    FaultKind.HIJACK: About("another client takes a worker's transactional.id, as a zombie or a twin would", 2),
    FaultKind.CUT: About("a connection is cut before or after a request or an answer", 20),
    FaultKind.DELAY: About("a request or an answer is held back, often past the client's time-out", 8),
    FaultKind.SILENCE: About("an answer is never delivered, and nothing after it on that connection", 4),
    FaultKind.REPEAT: About("a request reaches the broker a second time, later, on another connection", 10),
    FaultKind.REORDER: About("a request waits until one of another connection has been answered before it", 6),
    FaultKind.LATE: About(
        "an EndTxn outlives its connection, and comes when its client writes the next transaction", 4
    ),
}

BROKER_KINDS: Final = frozenset({FaultKind.KILL, FaultKind.RESTART, FaultKind.PAUSE, FaultKind.DISK, FaultKind.CLOCK})
"""What is done to a broker's process or machine."""

PROXY_KINDS: Final = frozenset(
    {
        FaultKind.CRASH,
        FaultKind.CUT,
        FaultKind.DELAY,
        FaultKind.SILENCE,
        FaultKind.REPEAT,
        FaultKind.REORDER,
        FaultKind.LATE,
    }
)
"""What is done to single requests and answers on their way, or when one comes by."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A kind that this run cannot have, and why."""

    kind: FaultKind
    reason: str

    def __str__(self) -> str:
        return f"no {self.kind}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The kinds of a run with their rates per minute, and those that are left out."""

    rates: Mapping[FaultKind, float]
    left_out: tuple[LeftOut, ...] = ()


def choose_kinds(
    asked: str | None, impossible: Mapping[FaultKind, str], flawed: Mapping[FaultKind, str] | None = None
) -> Chosen:
    """Read what the user asks for: `kill,cut=30` (30 a minute), `none`, or nothing for all that can be had.

    A kind that is asked for by name and cannot be had is an error; without a name it is left out, with the reason. What
    the target is known not to survive (`flawed`) is there for those who name it.

    >>> dict(choose_kinds("kill,cut=30", {}).rates)
    {<FaultKind.KILL: 'kill'>: 4, <FaultKind.CUT: 'cut'>: 30.0}
    """
    if asked is None or asked.strip() == "all":
        without = {**(flawed or {}), **impossible}
        return Chosen(
            {kind: about.per_minute for kind, about in ABOUT.items() if kind not in without},
            tuple(LeftOut(kind, without[kind]) for kind in ABOUT if kind in without),
        )
    if asked.strip() == "none":
        return Chosen({})
    rates = dict(_parse(item.strip()) for item in asked.split(",") if item.strip())
    for kind in rates:
        if kind in impossible:
            raise ConfigError(f"The fault {kind} cannot be had here: {impossible[kind]}. Leave it out of --faults.")
    # In one order, whichever the user wrote them in: the same seed must give the same plan.
    return Chosen({kind: rates[kind] for kind in ABOUT if kind in rates})


def _parse(item: str) -> tuple[FaultKind, float]:
    name, equals, number = item.partition("=")
    try:
        kind = FaultKind(name.strip())
    except ValueError:
        names = ", ".join(FaultKind)
        raise ConfigError(f"There is no fault {name.strip()!r}: write some of {names}, or none.") from None
    if not equals:
        return kind, ABOUT[kind].per_minute
    try:
        per_minute = float(number)
    except ValueError:
        per_minute = -1.0
    if not 0 < per_minute <= 6000:
        raise ConfigError(f"{item} is no rate: write a number per minute above 0, such as {kind}=6.")
    return kind, per_minute
