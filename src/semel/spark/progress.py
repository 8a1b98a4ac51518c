"""What a micro-batch cost: figures for each, as a value, and as one line of JSON in the log."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Final

LOG: Final = logging.getLogger("semel.spark")


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """One micro-batch or job.

    >>> BatchProgress("orders", batch_id=3, records=10).records
    10
    """

    pipeline: str
    batch_id: int | None = None
    """None for a job."""
    job_id: str | None = None
    records: int = 0
    input_bytes: int = 0
    """The rows in Arrow's form, as the sink got them."""
    bytes: int = 0
    """Encoded and compressed, as they went over the wire."""
    partitions: int = 0
    encode_ms: int = 0
    """The user's own computing, and turning its rows into record batches."""
    write_ms: int = 0
    commit_ms: int = 0
    open_ms: int = 0
    """From the start of the writing to the commit: at most so long readers of committed records had to wait."""
    attempts: int = 0
    skipped: bool = False
    """It had been committed before; nothing was written."""


def log_event(event: str, level: int = logging.INFO, **fields: object) -> None:
    """One line of JSON, for people and machines."""
    if LOG.isEnabledFor(level):
        LOG.log(level, json.dumps({"event": event, **fields}, default=str))


def log_progress(progress: BatchProgress) -> None:
    log_event("batch skipped" if progress.skipped else "batch committed", **asdict(progress))
