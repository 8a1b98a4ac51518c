"""Four ways to make a call for each record, under the same kills: what is missing, repeated or unknown in each.

The callee is a server of this process. It kills the worker at planned calls, either before it carries the call out or
after it, and always before it answers: so each way is killed at the same calls.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from semel.bridges.effects import Effects
from semel.broker.process import Broker
from semel.client.admin import Admin
from semel.client.producer import Producer
from semel.errors import ConfigError, SemelError
from semel.processes import spawn
from semel.verify.call_recorder import CallRecorder, Moment

Way = Literal["call, then commit", "commit, then call", "claimed, with key", "claimed, without key"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)
CLAIMED_NAME: Final = "side-effects"
BATCH: Final = 5
"""How many records a worker takes at a time."""
BATCHES: Final = 6
RECORDS: Final = BATCHES * BATCH
KILLS: Final = 4
RESULT_NAME: Final = "side-effects.json"
_LIFE_S: Final = 60.0

Kills = Mapping[str, Moment]
"""At the call with which body, and at which moment of it."""


@dataclass(frozen=True, slots=True)
class WayShown:
    """What became of the calls in one way."""

    way: Way
    calls: int
    """How many there should be."""
    missing: int
    """Not carried out."""
    repeated: int
    """Carried out more than once."""
    unknown: int
    """Reported as unknown, for a person to decide."""
    kills: int

    @property
    def keeps_its_promise(self) -> bool:
        """With the key all is exact. Without it nothing is repeated, and what is missing is reported."""
        if self.way == "claimed, with key":
            return not (self.missing or self.repeated or self.unknown)
        if self.way == "claimed, without key":
            return not self.repeated and self.missing <= self.unknown
        return True


@dataclass(frozen=True)
class EffectsComparison:
    """All four, and what follows from them."""

    seed: int
    shown: tuple[WayShown, ...]

    @property
    def why_nothing(self) -> str | None:
        """Why this says nothing; None if it does."""
        by_way = {one.way: one for one in self.shown}
        if len({one.kills for one in self.shown}) > 1 or not self.shown[0].kills:
            return "the four were not killed in the same way"
        if not by_way["call, then commit"].repeated:
            return "calling first repeated nothing, so the kills were too mild"
        if not by_way["commit, then call"].missing:
            return "committing first lost nothing, so the kills were too mild"
        return None

    @property
    def outcome(self) -> Literal["shown", "broken", "nothing"]:
        if not all(one.keeps_its_promise for one in self.shown):
            return "broken"
        return "nothing" if self.why_nothing else "shown"

    @property
    def conclusion(self) -> str:
        if self.outcome == "broken":
            return f"Not kept: {'; '.join(one.way for one in self.shown if not one.keeps_its_promise)}."
        if self.why_nothing is not None:
            return f"Nothing was shown: {self.why_nothing}."
        by_way = {one.way: one for one in self.shown}
        return (
            f"Calling first repeated {by_way['call, then commit'].repeated} calls, and committing first lost "
            f"{by_way['commit, then call'].missing}. Claimed calls were exact where the callee takes the key; where "
            f"it does not, none was repeated and {by_way['claimed, without key'].unknown} are known to be in doubt."
        )

    def to_json(self) -> str:
        result = {
            "outcome": self.outcome,
            "conclusion": self.conclusion,
            "seed": self.seed,
            "ways": [asdict(one) for one in self.shown],
        }
        return json.dumps(result, indent=1)


def plan_kills(seed: int) -> dict[str, Moment]:
    """At most one in a batch: what is lost with a batch cannot be killed at.

    >>> plan_kills(1) == plan_kills(1)
    True
    """
    dice = random.Random(seed)
    chosen = [batch * BATCH + dice.randrange(BATCH) for batch in dice.sample(range(BATCHES), KILLS)]
    moments: tuple[Moment, Moment] = ("received", "performed")
    return {str(number): moments[index % 2] for index, number in enumerate(chosen)}


def compare_effects(folder: Path, seed: int, watch: Callable[[Way], None] = lambda _: None) -> EffectsComparison:
    """Run all four, one after the other, on a broker of their own."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and a comparison needs a folder of its own: name another.")
    kills = plan_kills(seed)
    shown: list[WayShown] = []
    with Broker() as broker:
        _write_input(broker.bootstrap)
        for way in WAYS:
            watch(way)
            shown.append(_show(way, broker.bootstrap, folder, kills))
    comparison = EffectsComparison(seed, tuple(shown))
    (folder / RESULT_NAME).write_text(comparison.to_json())
    return comparison


def _write_input(bootstrap: str) -> None:
    with Admin({"bootstrap.servers": bootstrap}) as admin:
        admin.create_topics("calls")
    with Producer({"bootstrap.servers": bootstrap}) as producer:
        for number in range(RECORDS):
            producer.send("calls", str(number).encode())
        producer.flush()


def _show(way: Way, bootstrap: str, folder: Path, kills: Kills) -> WayShown:
    path = folder / f"{WAYS.index(way)}.db"
    killer = _Killer(kills)
    with CallRecorder(killer.interfere) as recorder:
        command = [sys.executable, "-m", "semel.verify.side_effects_worker", way, bootstrap, "calls"]
        for _ in range(len(kills) + 1):
            log = folder / f"{WAYS.index(way)}.log"
            killer.worker = spawn([*command, recorder.url, str(path)], folder=folder, output=log)
            if _wait(killer.worker, log) == 0:
                break
        else:
            raise SemelError(f"The worker of {way!r} was killed more often than planned.")
    with Effects(path, name=CLAIMED_NAME, takes_key=False) as effects:
        unknown = len(effects.unknown())
    return WayShown(
        way,
        RECORDS,
        missing=sum(not recorder.performed[str(number)] for number in range(RECORDS)),
        repeated=sum(count > 1 for count in recorder.performed.values()),
        unknown=unknown,
        kills=len(kills) - len(killer.left),
    )


def _wait(worker: subprocess.Popen[bytes], log: Path) -> int:
    try:
        status = worker.wait(_LIFE_S)
    except subprocess.TimeoutExpired as error:
        raise SemelError(f"A worker did not end within {_LIFE_S:g} seconds; its log is in {log}.") from error
    finally:
        worker.kill()
        worker.wait()
    if status not in (0, -signal.SIGKILL):
        raise SemelError(f"A worker ended with status {status}; its log is in {log}.")
    return status


class _Killer:
    """Kills the worker once at each planned call."""

    def __init__(self, kills: Kills) -> None:
        self.left = dict(kills)
        self.worker: subprocess.Popen[bytes] | None = None

    def interfere(self, moment: Moment, body: str) -> int | None:
        if self.left.get(body) != moment or self.worker is None:
            return None
        del self.left[body]
        os.kill(self.worker.pid, signal.SIGKILL)
        return 500  # nobody hears it
