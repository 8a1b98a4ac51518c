"""What the Kafka sides of a relay and of a mirror share: one owner for each name, and how its transactions end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, Literal

from semel.bridges import failpoints
from semel.bridges.retries import LOG
from semel.client.cluster import Cluster
from semel.client.producer import Producer
from semel.client.transaction_state import State
from semel.errors import Fenced, SemelError
from semel.spark.failpoints import WatchedCluster
from semel.wire import ErrorCode

Kind = Literal["relay", "mirror"]


class _WatchedByRelay(WatchedCluster):
    def end_was_sent(self) -> None:
        failpoints.reach("relay_end_sent")


class _WatchedByMirror(WatchedCluster):
    def end_was_sent(self) -> None:
        failpoints.reach("mirror_end_sent")


_WATCHED: Final[Mapping[Kind, type[Cluster]]] = {"relay": _WatchedByRelay, "mirror": _WatchedByMirror}


class NameOwner:
    """Owns the transactions of a name. A new one fences every older one, on whichever machine."""

    def __init__(self, kind: Kind, name: str) -> None:
        self._kind: Kind = kind
        self._name = name

    def _own(self, settings: Mapping[str, object]) -> None:
        is_watched = os.environ.get(failpoints.VARIABLE) or failpoints.is_armed()
        self._producer = Producer(settings, make_cluster=_WATCHED[self._kind] if is_watched else Cluster)

    @property
    def cluster(self) -> Cluster:
        return self._producer.cluster

    def close(self) -> None:
        try:
            self._producer.close()
        except SemelError as error:  # it must not take the place of the error that ended the run
            LOG.warning("The last transaction was not ended in order; its timeout aborts it: %s", error)

    def _end_open(self) -> None:
        """After an error, and again if it raises: end what is open. A lost commit is looked up, never guessed."""
        try:
            if self._producer.state is State.UNKNOWN:
                self._producer.resolve()
            elif self._producer.state in (State.OPEN, State.DOOMED):
                self._producer.abort()
            elif self._producer.state is State.DEAD:
                self._producer.begin()  # raises what it died of
        except Fenced as error:
            raise self._explain(error) from error

    def _explain(self, error: Fenced) -> Fenced:
        # An id that its coordinator has forgotten after a week of silence was taken over by nobody.
        if error.code == ErrorCode.invalid_producer_id_mapping:
            return error
        return Fenced(
            f"Another {self._kind} of the name {self._name!r} was started and has taken over, so this one stops: what "
            "it had not committed is aborted, and nothing is lost or repeated. Run one at a time, or give each its own "
            "name.",
            code=ErrorCode.producer_fenced,
            is_fatal=True,
        )
