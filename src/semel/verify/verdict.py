"""What the checker found: a verdict, its anomalies, and for each a few witnesses that a person can follow."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Witness:
    """One case of an anomaly: who wrote it, what they were told, who read it, where and when."""

    lines: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    """The rows of the history that tell it, in order of time, with names in place of numbers."""


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something that a history has and that should not be. With `tolerated`, the reason why it is no failure."""

    name: str
    definition: str
    count: int
    witnesses: tuple[Witness, ...] = ()
    tolerated: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """All anomalies found, and how much there was to look at: a clean verdict over nothing says nothing.

    >>> verdict = Verdict((Anomaly("g0", "a cycle", 3, tolerated="Kafka allows it"),), {"records": 10})
    >>> verdict.is_clean, verdict.counts
    (True, {'g0': 3})
    """

    anomalies: tuple[Anomaly, ...]
    checked: dict[str, int]
    faults: dict[str, int] = field(default_factory=dict[str, int])
    """What the run went through, as of `semel.verify.faults.tally`; a checker that has only a history cannot know."""

    @property
    def is_clean(self) -> bool:
        return all(anomaly.tolerated is not None for anomaly in self.anomalies)

    @property
    def counts(self) -> dict[str, int]:
        return {anomaly.name: anomaly.count for anomaly in self.anomalies}

    def to_json(self) -> str:
        fields = {
            "is_clean": self.is_clean,
            "checked": self.checked,
            "faults": self.faults,
            "anomalies": [asdict(one) for one in self.anomalies],
        }
        return json.dumps(fields, indent=1)
