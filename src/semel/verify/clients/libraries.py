"""Which client libraries a verification can use, and what each of them cannot do.

A library is loaded when it is first used; Semel itself needs none of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Final

from semel.client.settings import parse_config
from semel.errors import ConfigError
from semel.verify.clients.face import Clients, Surroundings


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that a library cannot do, why, and what is done in its place."""

    feature: str
    reason: str
    instead: str


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    package: str
    """As `pip install` knows it."""
    module: str
    has_safe_groups: bool
    """Its group members commit positions in a transaction so that a late one is refused (KIP-447)."""
    gaps: tuple[Gap, ...] = ()


_OWN_PARTITIONS: Final = (
    "each worker has a fixed share of the partitions and a transactional id of its own, which fences its former life; "
    "the positions are asked for by Semel's client"
)

LIBRARIES: Final[Mapping[str, Library]] = {
    library.name: library
    for library in (
        Library(
            "semel",
            "semel",
            "semel_client",
            has_safe_groups=False,
            gaps=(Gap("groups", "the workloads use its producer and its fetcher, not its session", _OWN_PARTITIONS),),
        ),
        Library("confluent-kafka", "confluent-kafka", "confluent_client", has_safe_groups=True),
        Library(
            "kafka-python",
            "kafka-python",
            "kafka_python_client",
            has_safe_groups=True,
            gaps=(
                Gap(
                    "waiting for a bounded time",
                    "its commit, abort and sending of positions wait without end",
                    "the call is left behind in a thread after its time, and a new producer fences what it left",
                ),
            ),
        ),
        Library(
            "aiokafka",
            "aiokafka",
            "aiokafka_client",
            has_safe_groups=False,
            gaps=(
                Gap(
                    "groups",
                    "it does not tell which member of the group commits (no KIP-447), nor does it wait for positions "
                    "in open transactions, so what a late member commits is accepted",
                    _OWN_PARTITIONS,
                ),
                Gap(
                    "dooming a transaction",
                    "it commits a transaction of which a record could not be stored",
                    "every record is waited for before the commit, which becomes an abort",
                ),
            ),
        ),
    )
}


def find_library(name: str) -> Library:
    """
    >>> find_library("semel").gaps[0].feature
    'groups'
    """
    library = LIBRARIES.get(name)
    if library is None:
        raise ConfigError(f"There is no client library {name!r} here: choose one of {', '.join(LIBRARIES)}.")
    return library


def open_clients(name: str, surroundings: Surroundings) -> Clients:
    """The clients of a library; `ConfigError` if it is not installed."""
    library = find_library(name)
    # Semel's client works beside every library, so that it must understand the settings too: better now than in a loop
    # that takes every failure for a broker that is away.
    parse_config({"bootstrap.servers": surroundings.bootstrap, **surroundings.settings})
    return _load(library).open_clients(surroundings)


def ensure_installed(name: str) -> None:
    """Raise `ConfigError` if there is no such library, or if it is not installed here."""
    _load(find_library(name))


def _load(library: Library) -> ModuleType:
    try:
        return import_module(f"semel.verify.clients.{library.module}")
    except ModuleNotFoundError as missing:
        if missing.name is not None and missing.name.startswith("semel"):
            raise
        raise ConfigError(
            f"{library.name} is missing. Install it: pip install {library.package} (or all of them: 'semel[clients]')"
        ) from missing
