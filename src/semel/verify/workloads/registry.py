"""The workloads by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from semel.errors import ConfigError
from semel.verify.workloads.bank import Bank
from semel.verify.workloads.copier import Copier
from semel.verify.workloads.counters import Counters
from semel.verify.workloads.list_append import ListAppend
from semel.verify.workloads.options import Options
from semel.verify.workloads.workload import Workload

WORKLOADS: Final[Mapping[str, type[Workload]]] = {kind.name: kind for kind in (Copier, Bank, ListAppend, Counters)}


def make_workload(name: str, prefix: str, options: Options | None = None) -> Workload:
    """
    >>> make_workload("bank", "run-1").topics()
    {'run-1-accounts': 4}
    """
    kind = WORKLOADS.get(name)
    if kind is None:
        raise ConfigError(f"There is no workload {name!r}: choose one of {', '.join(WORKLOADS)}.")
    return kind(prefix, options)
