"""Configs as DescribeConfigs and CreateTopics tell them: value, where it comes from, and what it would be otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from semel.broker.config_types import render
from semel.broker.configs import BROKER_CONFIGS, BrokerSettings, Source
from semel.broker.topic_configs import TOPIC_CONFIGS

_UNKNOWN_TYPE = 0


@dataclass(frozen=True, slots=True)
class Synonym:
    """One place that could give the value."""

    name: str
    value: str | None
    source: Source


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One config. `value` is None when nothing is set, and where it is secret."""

    name: str
    value: str | None
    source: Source
    is_read_only: bool
    is_sensitive: bool
    type: int
    synonyms: tuple[Synonym, ...]


def topic_entries(configs: Mapping[str, str], settings: BrokerSettings) -> Iterator[ConfigEntry]:
    """Every config of a topic that has `configs` of its own.

    >>> entries = {entry.name: entry for entry in topic_entries({"flush.ms": "5"}, BrokerSettings())}
    >>> entries["flush.ms"].source.name, entries["retention.ms"].value, entries["retention.ms"].source.name
    ('TOPIC', '604800000', 'DEFAULT')
    """
    for name, key in TOPIC_CONFIGS.items():
        if key.is_hidden and name not in configs:
            continue
        own = [Synonym(name, configs[name], Source.TOPIC)] if name in configs else []
        synonyms = (*own, *_from_broker((synonym for synonym, _ in key.synonyms), settings))
        value = configs[name] if own else render(settings.topic_defaults[name])
        source = synonyms[0].source if synonyms else Source.DEFAULT
        yield ConfigEntry(name, value, source, False, False, key.type, synonyms)


def broker_entries(settings: BrokerSettings) -> Iterator[ConfigEntry]:
    """Every config of this broker. One that it does not know may be anything, a password too, and is not shown."""
    for name, key in BROKER_CONFIGS.items():
        synonyms = tuple(_from_broker([name], settings))
        source = synonyms[0].source if synonyms else Source.DEFAULT
        value = render(settings.values[name])
        yield ConfigEntry(name, value, source, not key.is_dynamic, False, key.type, synonyms)
    for name in settings.unknown:
        synonym = Synonym(name, None, Source.START_UP)
        yield ConfigEntry(name, None, Source.START_UP, True, True, _UNKNOWN_TYPE, (synonym,))


def all_brokers_entries(settings: BrokerSettings) -> Iterator[ConfigEntry]:
    """What was altered for all brokers at once."""
    for name, text in settings.dynamic_default.items():
        synonym = Synonym(name, text, Source.ALL_BROKERS)
        yield ConfigEntry(name, text, Source.ALL_BROKERS, False, False, BROKER_CONFIGS[name].type, (synonym,))


def _from_broker(names: Iterable[str], settings: BrokerSettings) -> Iterator[Synonym]:
    defaults: list[Synonym] = []
    for name in names:
        yield from (Synonym(name, text, source) for text, source in settings.layers(name))
        default = BROKER_CONFIGS[name].default
        if default is not None:
            defaults.append(Synonym(name, render(default), Source.DEFAULT))
    yield from defaults
