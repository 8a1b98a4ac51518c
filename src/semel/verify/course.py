"""What every run of `semel verify` has in common: a folder, a plan of faults, progress, and results at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Protocol

from semel.errors import ConfigError, InvalidState
from semel.verify.faults.driver import Driver
from semel.verify.faults.kinds import Chosen
from semel.verify.faults.plan import Cast, FaultPlan, make_plan
from semel.verify.faults.tally import tally
from semel.verify.judge import Judge
from semel.verify.report import write_report
from semel.verify.verdict import Verdict

TEND_S: Final = 0.2
_LOOK_S: Final = 1.0


@dataclass(frozen=True)
class Progress:
    """How a run stands."""

    stage: str
    elapsed_s: float
    lives: int = 0
    faults_done: int = 0
    faults_planned: int = 0
    unstable: int | None = None
    """Offsets that readers of committed records cannot have yet; None while no broker answers."""


@dataclass(frozen=True)
class Finished:
    """What a run ends with."""

    verdict: Verdict
    folder: Path
    report: Path
    notes: tuple[str, ...] = ()
    """What a user should know besides the verdict."""


Watch = Callable[[Progress], None]


class Processes(Protocol):
    """The client processes of a run."""

    @property
    def lives(self) -> int:
        """How many processes there were in all."""
        ...

    def tend(self) -> None:
        """Start again what has ended."""
        ...


class Course:
    """Lets faults come for a while, tells how the run stands, and writes its results."""

    def __init__(
        self,
        folder: Path,
        *,
        time_s: float,
        faults: FaultPlan,
        driver: Driver,
        judge: Judge,
        processes: Processes,
        watch: Watch,
    ) -> None:
        self.folder = folder
        self._time_s = time_s
        self._faults = faults
        self._driver = driver
        self._judge = judge
        self._processes = processes
        self._watch = watch
        self._began = time.monotonic()
        self._began_at = datetime.now(UTC)
        (folder / "plan.json").write_text(faults.to_json())

    def live(self) -> None:
        """Let the faults come, and return when they are over and taken back. Raises what cannot be taken back."""
        self._driver.start()
        until = time.monotonic() + self._time_s
        look_at = time.monotonic()
        while time.monotonic() < until:
            self._processes.tend()
            self._driver.raise_failure()
            if time.monotonic() >= look_at:
                unstable = self._judge.look(timeout_ms=1_000)
                look_at = time.monotonic() + _LOOK_S
                self.tell("under faults" if self._faults.faults else "running", unstable)
            time.sleep(TEND_S)
        self._driver.stop()
        self._driver.raise_failure()

    def tell(self, stage: str, unstable: int | None = None) -> None:
        self._watch(
            Progress(
                stage=stage,
                elapsed_s=time.monotonic() - self._began,
                lives=self._processes.lives,
                faults_done=sum(record.outcome == "done" for record in list(self._driver.records)),
                faults_planned=len(self._faults.faults),
                unstable=unstable,
            )
        )

    def finish(
        self, found: Verdict, facts: Mapping[str, Any], *, longest_timeout_ms: int, notes: Iterable[str] = ()
    ) -> Finished:
        """Write the verdict, with the faults that were carried out, what else a report needs, and the report."""
        verdict = replace(found, faults=tally(self._driver.records, longest_timeout_ms=longest_timeout_ms))
        common = {
            "began": self._began_at.strftime("%Y-%m-%d %H:%M:%S UTC"),
            "lives": self._processes.lives,
            "left_out": {one.kind.value: one.reason for one in self._faults.left_out},
        }
        (self.folder / "verdict.json").write_text(verdict.to_json())
        (self.folder / "run.json").write_text(json.dumps({**common, **facts}, indent=1))
        self.tell("writing the report")
        return Finished(verdict, self.folder, write_report(self.folder), tuple(notes))


def new_folder(folder: Path) -> None:
    """Make the folder of a run; one with another run in it is refused."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and a run begins with a folder of its own: name another.")


def plan_faults(
    replay: Path | None, *, seed: int, time_s: float, chosen: Chosen, cast: Cast, apis: Mapping[str, str] | None = None
) -> FaultPlan:
    """Made from the seed, with requests renamed as of `apis`; or that of another run."""
    if replay is None:
        plan = make_plan(seed, chosen.rates, int(time_s * 1000), cast, left_out=chosen.left_out)
        return plan.renamed(apis or {})
    text = replay.read_text()
    if replay.suffix == ".jsonl":
        return FaultPlan.from_records(text.splitlines(), seed=seed)
    return FaultPlan.from_json(text)


def versions(*packages: str) -> dict[str, str]:
    """Of Python and those of these packages that are installed."""
    found = {"Python": sys.version.split()[0]}
    for name in dict.fromkeys(packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def ensure_verdict(finished: Finished) -> Verdict:
    """A verdict over nothing is none: a run in which nobody could work must not look like a success."""
    if not finished.verdict.checked.get("records"):
        raise InvalidState(f"No record was written in this run, so there is nothing to judge: see {finished.folder}.")
    return finished.verdict
