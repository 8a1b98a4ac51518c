"""The input offsets of a query into a database, committed to a Kafka group after the batch, so that lag tools see it.

Nothing depends on them. The database knows no brokers, so those of the query's own Kafka sources are used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from semel.bridges.lag_offsets import LagOffsets
from semel.client.admin import Admin
from semel.client.partitions import TopicPartition
from semel.errors import SemelError
from semel.spark.input_offsets import InputEnd, merge_ends
from semel.spark.lag import BOOTSTRAP, kafka_sources
from semel.spark.progress import log_event

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_TIMEOUT_MS: Final = 10_000
"""How long a batch waits for brokers that do not answer."""


@dataclass(frozen=True, slots=True)
class _Brokers:
    """One cluster that the query reads from."""

    admin: Admin
    lag: LagOffsets


class InputLag:
    """The group of one pipeline. With `group=None` nothing is committed."""

    def __init__(self, pipeline: str, group: str | None, sources: Sequence[Mapping[str, object]] = ()) -> None:
        self._pipeline = pipeline
        self._group = group
        self._given = sources
        self._brokers: dict[str, _Brokers] = {}
        self._is_silent = False

    def commit(self, df: DataFrame, ends: list[InputEnd]) -> None:
        """After the database's commit, or for a batch that was there already. Failures are logged and stop nothing."""
        if self._group is None or not ends:
            return
        sources = {str(one[BOOTSTRAP]): one for one in self._given or kafka_sources(df)}
        if not sources:
            self._explain_silence()
        for address, settings in sources.items():
            brokers = self._brokers_at(address, settings)
            if brokers is not None:
                is_only = len(sources) == 1
                brokers.lag.commit_found(lambda admin=brokers.admin, is_only=is_only: _offsets(admin, ends, is_only))

    def close(self) -> None:
        for brokers in self._brokers.values():
            brokers.admin.close()
        self._brokers = {}

    def _brokers_at(self, address: str, settings: Mapping[str, object]) -> _Brokers | None:
        if address not in self._brokers:
            try:
                admin = Admin({**settings, "default.api.timeout.ms": _TIMEOUT_MS})
            except SemelError as error:
                self._warn(f"the source's settings cannot be used here: {error}")
                return None
            self._brokers[address] = _Brokers(admin, LagOffsets(admin, self._group))
        return self._brokers[address]

    def _explain_silence(self) -> None:
        self._warn(
            "Spark does not tell the input's brokers: pass input_settings={'bootstrap.servers': ...}, or group=None to "
            "go without the lag"
        )

    def _warn(self, reason: str) -> None:
        """Once, as it stays so."""
        if not self._is_silent:
            self._is_silent = True
            log_event("lag is not visible", logging.WARNING, pipeline=self._pipeline, group=self._group, reason=reason)


def _offsets(admin: Admin, ends: Sequence[InputEnd], is_only: bool) -> dict[TopicPartition, int]:
    """Those that are of this cluster. Where a source does not tell its cluster, there must be only one to choose."""
    here = admin.describe_cluster().cluster_id
    return merge_ends([end for end in ends if end.cluster == here or (end.cluster is None and is_only)])
