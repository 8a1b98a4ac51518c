"""Another client takes a worker's transactional.id: a twin that starts with the same id, or a zombie that wakes up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from semel.client.cluster import Cluster
from semel.client.ownership import NOBODY, ProducerIdentity
from semel.client.settings import parse_config
from semel.client.transactions import TransactionCalls
from semel.errors import Fenced, KafkaError

_PATIENCE_MS: Final = 5_000
_TRANSACTION_TIMEOUT_MS: Final = 10_000


class NoOwner(Exception):
    """There is nobody to take the id from, or the broker cannot tell who."""


def hijack(bootstrap: str, transactional_id: str, *, keeps_epoch: bool, wait: Callable[[], None]) -> str:
    """Call InitProducerId with the victim's id and tell in words what came of it.

    Without `keeps_epoch` as every new producer does, which fences the victim. With it in the name of the identity that
    the victim has now, kept for as long as `wait` takes (KIP-360): a broker must refuse it if the victim has moved on.
    One epoch behind is not refused, as it may be the repeat of a call whose answer was lost: it gets the victim's own.
    """
    settings: dict[str, object] = {
        "bootstrap.servers": bootstrap,
        "client.id": "hijacker",
        "default.api.timeout.ms": _PATIENCE_MS,
        "request.timeout.ms": _PATIENCE_MS,
    }
    with Cluster(parse_config(settings).client) as cluster:
        calls = TransactionCalls(cluster, transactional_id, _TRANSACTION_TIMEOUT_MS, cluster.transaction_protocol)
        kept = _present_identity(calls) if keeps_epoch else NOBODY
        if keeps_epoch:
            wait()
        try:
            taken = calls.init_producer_id(kept)
        except KafkaError as error:
            if not isinstance(error, Fenced) and not error.is_fatal:
                raise
            return f"refused ({error.code.name}), with the kept epoch {kept.producer_epoch}"
    how = f"with the kept epoch {kept.producer_epoch}" if keeps_epoch else "as a new producer"
    return f"took producer id {taken.producer_id} epoch {taken.producer_epoch}, {how}"


def _present_identity(calls: TransactionCalls) -> ProducerIdentity:
    try:
        owner = calls.owner()
    except KafkaError as error:
        raise NoOwner(f"nobody has the id yet ({error.code.name})") from error
    if owner is None:
        raise NoOwner("the broker does not tell who owns a transactional.id (before Kafka 3.0)")
    return owner.identity
