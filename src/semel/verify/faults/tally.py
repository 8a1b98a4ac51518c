"""How much a run went through: the faults that were really carried out, counted as one would ask for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from semel.verify.faults.driver import Record
from semel.verify.faults.kinds import FaultKind

_KILLS: Final = (FaultKind.KILL, FaultKind.WORKER_KILL, FaultKind.CRASH)
_LONG_PAUSES: Final = (FaultKind.PAUSE, FaultKind.STORM, FaultKind.ZOMBIE)
"""Of a broker, or of somebody who has a transaction. A plain worker-pause may meet one who has no time-out at all."""


def tally(records: Iterable[Record], *, longest_timeout_ms: int) -> dict[str, int]:
    """Sums first, then each kind. What was planned and met nobody does not count, nor does a pause that was too short.

    >>> from semel.verify.faults.plan import Fault
    >>> def done(kind, ms): return Record(Fault(0, 0, kind), 0, 0, ms * 1_000_000, "done", "")
    >>> told = tally([done(FaultKind.ZOMBIE, 999), done(FaultKind.ZOMBIE, 1001)], longest_timeout_ms=1_000)
    >>> told["pauses past every time-out"], told["zombie"]
    (1, 2)
    """
    done = [record for record in records if record.outcome == "done"]
    counts = Counter(record.fault.kind for record in done)
    long = [record for record in done if record.fault.kind in _LONG_PAUSES and _lasted_ms(record) > longest_timeout_ms]
    return {
        "process kills": sum(counts[kind] for kind in _KILLS),
        "connection cuts": counts[FaultKind.CUT],
        "pauses past every time-out": len(long),
        **{kind.value: counts[kind] for kind in FaultKind if counts[kind]},
    }


def _lasted_ms(record: Record) -> float:
    return (record.end_ns - record.begin_ns) / 1e6
