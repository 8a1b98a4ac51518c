"""Connections that outlive a task: Spark keeps its Python workers, and each new connection costs some round trips."""

from __future__ import annotations

import os
from collections.abc import Mapping

from semel.client.cluster import Cluster
from semel.client.settings import parse_config

_known: dict[tuple[int, tuple[tuple[str, str], ...]], Cluster] = {}


def shared_cluster(settings: Mapping[str, object]) -> Cluster:
    """The cluster behind these settings, connected at most once in this process."""
    # Spark forks its workers from one daemon: a connection must never be used on both sides of a fork.
    key = (os.getpid(), tuple(sorted((name, str(value)) for name, value in settings.items())))
    if key not in _known:
        _known[key] = Cluster(parse_config(settings).client)
    return _known[key]


def close_connections() -> None:
    """Close what this process has open, as its end would."""
    for cluster in _known.values():
        cluster.close()
    _known.clear()
