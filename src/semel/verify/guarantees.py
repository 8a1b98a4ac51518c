"""The same pipeline three times under the same faults: at most once, at least once, exactly once; and what each loses.

The runs follow each other, each on a cluster (or topics) of its own, with the same input, record for record, and the
same plan of faults. The checker that `semel verify` has judges all three; what it holds against the first two is what
they are known for. Should they come through unharmed, the faults were too mild to say anything about the third.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from semel.errors import ConfigError
from semel.verify.course import Progress, ensure_verdict
from semel.verify.evidence import gather
from semel.verify.faults.kinds import FaultKind
from semel.verify.faults.targets import RemoteTarget, parse_target
from semel.verify.history import History
from semel.verify.losses import Tally, count
from semel.verify.run import RunSettings, run
from semel.verify.stories import Story, tell
from semel.verify.workloads.options import GUARANTEES, Guarantee, Options

RESULT_NAME: Final = "guarantees.json"
# Deaths between two steps of a worker are what the three differ in, so they come more often than in life.
DEFAULT_RATES: Final = {
    FaultKind.KILL: 4.0,
    FaultKind.PAUSE: 3.0,
    FaultKind.WORKER_KILL: 6.0,
    FaultKind.WORKER_PAUSE: 3.0,
    FaultKind.CRASH: 30.0,
    FaultKind.CUT: 20.0,
    FaultKind.DELAY: 6.0,
}
DEFAULT_OPTIONS: Final = {"rate": 800.0, "batch_records_max": 50, "session_timeout_ms": 2_000}
_REMOTE_SESSION_MS: Final = 6_000
"""The least that brokers allow unless they are told otherwise."""
_FIXED: Final = {
    "sources": 1,
    "readers": 0,
    "uncommitted_readers": 0,
    "abort_fraction": 0.0,
    "writing": "idempotent",
    "acks": "all",
}
_APIS: Final = {"PRODUCE": "PRODUCE", "FETCH": "FETCH", "OFFSET_COMMIT": "OFFSET_COMMIT"}
_APIS_OF_TRANSACTIONS: Final = {**_APIS, "OFFSET_COMMIT": "END_TXN"}
"""What commits the positions there: a fault that is planned for the commit strikes each pipeline at its own."""
_DEATHS: Final = frozenset({"kill", "worker-kill", "crash"})

Outcome = Literal["shown", "broken", "nothing"]


@dataclass(frozen=True)
class GuaranteeSettings:
    """What the user asks for; `options` are changes to `DEFAULT_OPTIONS`."""

    folder: Path
    target: str = "embedded"
    client: str = "semel"
    faults: str | None = None
    seed: int = 0
    time_s: float = 15.0
    """Of each of the three runs."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    def command(self) -> str:
        """What runs it again."""
        words = ["semel", "guarantees", "--target", self.target, "--client", self.client]
        words += ["--seed", str(self.seed), "--time", f"{self.time_s:g}s"]
        if self.faults is not None:
            words += ["--faults", self.faults]
        for name, value in self.options.items():
            words += ["--option", f"{name}={value}"]
        return shlex.join(words)

    def run_of(self, guarantee: Guarantee) -> RunSettings:
        """The run of `semel verify` that shows this guarantee."""
        target = parse_target(self.target, folder=self.folder / "target")
        refused = sorted(set(self.options) & {*_FIXED, "records", "guarantee"})
        if refused:
            raise ConfigError(f"{', '.join(refused)} is the same in every comparison: leave it out.")
        options = {**DEFAULT_OPTIONS, **self.options, **_FIXED, "guarantee": guarantee}
        if isinstance(target, RemoteTarget) and "session_timeout_ms" not in self.options:
            options["session_timeout_ms"] = _REMOTE_SESSION_MS
        if float(options["rate"]) <= 0:
            raise ConfigError("rate=0 gives every run another input: write how many records a second it has.")
        options["records"] = max(1, math.ceil(float(options["rate"]) * self.time_s))
        rates = {kind: rate for kind, rate in DEFAULT_RATES.items() if kind not in target.impossible}
        return RunSettings(
            folder=self.folder / guarantee,
            target=self.target,
            client=self.client,
            faults=self.faults or ",".join(f"{kind}={rate:g}" for kind, rate in rates.items()),
            seed=self.seed,
            time_s=self.time_s,
            options=Options.from_mapping(options),
            has_given_input=True,
            apis=_APIS_OF_TRANSACTIONS if guarantee == "exactly-once" else _APIS,
            part_of=self.command(),
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """What one guarantee made of the input and the faults."""

    guarantee: Guarantee
    tally: Tally
    is_clean: bool
    """The checker holds nothing against it: exactly once."""
    counts: dict[str, int]
    """All anomalies that the checker found."""
    faults: int
    """That struck, of those planned: a request that this pipeline never makes cannot be met."""
    deaths: int
    """Of brokers and workers, among them."""
    lives: int
    story: Story | None
    report: Path

    @property
    def keeps_its_promise(self) -> bool:
        """At most once never repeats, at least once never loses, exactly once does neither, nor anything else."""
        if self.guarantee == "exactly-once":
            return self.is_clean and not self.tally.lost and not self.tally.repeated
        return not (self.tally.repeated if self.guarantee == "at-most-once" else self.tally.lost)


@dataclass(frozen=True)
class Comparison:
    """All three, and what follows from them."""

    settings: GuaranteeSettings
    shown: tuple[Shown, ...]
    faults_planned: int
    report: Path

    @property
    def why_nothing(self) -> str | None:
        """Why this says nothing about exactly once; None if it does."""
        by_name = {one.guarantee: one for one in self.shown}
        if len({one.tally.input for one in self.shown}) > 1:
            return "the three had not the same input"
        if not by_name["exactly-once"].deaths:
            return "nobody died while the exactly-once pipeline ran"
        if not by_name["at-most-once"].tally.lost:
            return "the at-most-once pipeline lost nothing, so the faults were too mild"
        if not by_name["at-least-once"].tally.repeated:
            return "the at-least-once pipeline repeated nothing, so the faults were too mild"
        return None

    @property
    def outcome(self) -> Outcome:
        if not all(one.keeps_its_promise for one in self.shown):
            return "broken"
        return "nothing" if self.why_nothing else "shown"

    def to_json(self) -> str:
        settings = self.settings
        result: dict[str, Any] = {
            "outcome": self.outcome,
            "why_nothing": self.why_nothing,
            "command": settings.command(),
            **{one.name: getattr(settings, one.name) for one in fields(settings) if one.name != "folder"},
            "faults_planned": self.faults_planned,
            "guarantees": [_as_dict(one) for one in self.shown],
        }
        return json.dumps(result, indent=1)


def _as_dict(shown: Shown) -> dict[str, Any]:
    fields_of = asdict(shown) | {"keeps_its_promise": shown.keeps_its_promise, "report": str(shown.report)}
    if math.isnan(shown.tally.batch_ms):
        fields_of["tally"]["batch_ms"] = None
    return fields_of


Watch = Callable[[Guarantee, Progress], None]


def compare(settings: GuaranteeSettings, watch: Watch = lambda *_: None) -> Comparison:
    """Run all three, one after the other. Raises a SemelError if one could not be brought to its end."""
    settings.folder.mkdir(0o700, parents=True, exist_ok=True)
    if any(settings.folder.iterdir()):
        raise ConfigError(f"{settings.folder} is not empty, and a comparison has a folder of its own: name another.")
    runs = [settings.run_of(guarantee) for guarantee in GUARANTEES]  # all of them, so that no mistake is found late
    shown = tuple(_show(one, watch) for one in runs)
    planned = len(json.loads((settings.folder / GUARANTEES[0] / "plan.json").read_text())["faults"])
    comparison = Comparison(settings, shown, planned, settings.folder / "report.html")
    (settings.folder / RESULT_NAME).write_text(comparison.to_json())
    return comparison


def _show(settings: RunSettings, watch: Watch) -> Shown:
    guarantee = settings.options.guarantee
    finished = run(settings, lambda progress: watch(guarantee, progress))
    verdict = ensure_verdict(finished)
    faults = read_faults(finished.folder)
    history = History.in_folder(finished.folder)
    evidence = gather(history)
    done = [fault for fault in faults if fault["outcome"] == "done"]
    return Shown(
        guarantee=guarantee,
        tally=count(history, evidence),
        is_clean=verdict.is_clean,
        counts=verdict.counts,
        faults=len(done),
        deaths=sum(fault["kind"] in _DEATHS for fault in done),
        lives=json.loads((finished.folder / "run.json").read_text())["lives"],
        story=tell(guarantee, history, evidence, faults),
        report=finished.report,
    )


def read_faults(folder: Path) -> Sequence[dict[str, Any]]:
    """What a run has recorded of its faults."""
    path = folder / "faults.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
