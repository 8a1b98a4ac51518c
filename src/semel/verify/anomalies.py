"""All anomalies that the checker looks for, in the order in which it reports them.

Each is a pure function from the evidence to the cases found; its docstring is its definition. They are in files by
subject: what was written, what was read, what a pipeline made of its input, and circles of transactions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Final

from semel.verify.anomalies_of_pipelines import double_consume, wrong_aggregate
from semel.verify.anomalies_of_reads import (
    aborted_read,
    dirty_read,
    misrouted_payload,
    nonmonotonic_poll,
    poll_skip,
    precommitted_read,
)
from semel.verify.anomalies_of_writes import (
    duplicate,
    hung_lso,
    inconsistent_offsets,
    lost_write,
    nonmonotonic_send,
    order_violation,
    torn_transaction,
    unseen,
)
from semel.verify.cases import Found
from semel.verify.cycles import G0_IS_TOLERATED, g0, g1c
from semel.verify.evidence import Evidence

ANOMALIES: Final[tuple[Callable[[Evidence], Found], ...]] = (
    lost_write,
    unseen,
    duplicate,
    inconsistent_offsets,
    aborted_read,
    dirty_read,
    precommitted_read,
    torn_transaction,
    double_consume,
    order_violation,
    poll_skip,
    nonmonotonic_poll,
    nonmonotonic_send,
    hung_lso,
    wrong_aggregate,
    misrouted_payload,
    g0,
    g1c,
)
TOLERATED: Final = {"g0": G0_IS_TOLERATED}


def definition(anomaly: Callable[[Evidence], Found]) -> str:
    """What an anomaly is, in one paragraph.

    >>> definition(precommitted_read)
    'A read_committed reader saw a record before its transaction asked to commit.'
    """
    return " ".join((inspect.getdoc(anomaly) or "").split("\n\n")[0].split())
