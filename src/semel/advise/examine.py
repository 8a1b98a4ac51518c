"""The doctor's three ways to look: settings, a file, a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from semel.advise.client_settings import ClientSettings, read_settings_file, settings_of
from semel.advise.cluster_check import check_cluster
from semel.advise.cluster_facts import ClusterFacts, collect_facts
from semel.advise.rules import Finding, in_order
from semel.advise.settings_check import check_beside, check_settings
from semel.advise.source_check import check_source
from semel.advise.source_tree import SourceTree
from semel.errors import ConfigError


def examine_settings(settings: Mapping[str, object], *, where: str = "settings") -> list[Finding]:
    """Check one client's settings, under Kafka's names or a library's, or the options of a Spark reader or writer.

    >>> [found.rule.id for found in examine_settings({"transactional.id": "a", "enable.auto.commit": True})]
    ['auto-commit-with-transactions']
    """
    return in_order(check_settings(settings_of(settings, where)))


def examine_files(paths: Iterable[str | Path], *, transaction_timeout_ms_max: int | None = None) -> list[Finding]:
    """Check Python programs and files of settings (properties, JSON or YAML).

    Settings of one cluster are taken for clients that run at the same time, so they must not share an id.
    """
    found: list[Finding] = []
    beside: list[ClientSettings] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"{path} is not there: name a Python file, or a file of settings.")
        if path.suffix == ".py":
            found += check_source(SourceTree.read(path), transaction_timeout_ms_max=transaction_timeout_ms_max)
        else:
            given = read_settings_file(path)
            for one in given:
                found += check_settings(one, transaction_timeout_ms_max=transaction_timeout_ms_max)
            beside += given
    return in_order([*found, *check_beside(beside)])


def examine_cluster(
    settings: Mapping[str, object],
    *,
    topics: Iterable[str] | None = None,
    longest_pause_s: float | None = None,
    watch_s: float = 2.0,
) -> tuple[list[Finding], ClusterFacts]:
    """Look at a running cluster. The facts say what was seen, and what was not and why."""
    facts = collect_facts(settings, topics=topics, watch_s=watch_s)
    return in_order(check_cluster(facts, longest_pause_s=longest_pause_s)), facts
