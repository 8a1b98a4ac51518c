"""The rules about one running pipeline: what is known of it becomes findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from semel.advise.rules import Finding, finding

_SHARE_MAX: Final = 2 / 3
"""Of the timeout. Above it a slow day is enough for an abort."""


@dataclass(frozen=True, slots=True)
class IdFacts:
    """A transactional id of the pipeline, and how long its last transactions were open, as its coordinator logged."""

    transactional_id: str
    state: str
    timeout_ms: int
    open_ms: tuple[int, ...] = ()


@dataclass(slots=True)
class PipelineFacts:
    """What a cluster knows of a pipeline."""

    name: str
    ids: list[IdFacts] = field(default_factory=list[IdFacts])
    group: str | None = None
    """Its group, if there is one of its name."""
    topics: list[str] = field(default_factory=list[str])
    """What it reads, as far as its group has positions, and what it writes, as far as its ledger says."""
    last_batch: str | None = None
    """What its ledger names last, in words."""
    last_commit_ms: int | None = None
    not_seen: list[str] = field(default_factory=list[str])

    @property
    def is_known(self) -> bool:
        return bool(self.ids or self.group or self.last_batch)

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "name": self.name,
            "transactional_ids": [
                {
                    "id": one.transactional_id,
                    "state": one.state,
                    "timeout_ms": one.timeout_ms,
                    "longest_open_ms": max(one.open_ms, default=None),
                }
                for one in self.ids
            ],
            "group": self.group,
            "topics": self.topics,
            "last_batch": self.last_batch,
            "last_commit_ms": self.last_commit_ms,
        }


def check_pipeline(facts: PipelineFacts) -> Iterator[Finding]:
    """What is wrong with a pipeline that is not wrong with its topics."""
    for one in facts.ids:
        longest_ms = max(one.open_ms, default=0)
        if one.timeout_ms > 0 and longest_ms > one.timeout_ms * _SHARE_MAX:
            yield finding(
                "transaction-timeout-too-short",
                f"transactional.id {one.transactional_id}",
                f"one of its last {len(one.open_ms)} transactions was open for {longest_ms / 1000:.1f} s, and "
                f"transaction.timeout.ms={one.timeout_ms}",
                f"transaction.timeout.ms={3 * longest_ms}",
            )
