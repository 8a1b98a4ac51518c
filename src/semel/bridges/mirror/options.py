"""What a mirror was told to do, checked as far as that goes without a broker."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from semel.client.settings import parse_config
from semel.errors import ConfigError

PROGRESS_TOPIC: Final = "semel-mirror-progress"
OFFSETS_TOPIC: Final = "semel-mirror-offsets"
ORIGIN_HEADER: Final = "semel.mirror.origin"
"""On every mirrored record, once for each mirror that it went through: the id of the cluster that it was read from."""
CUT_BYTES: Final = 32 << 20
BUFFER_BYTES: Final = 256 << 20
RETRY_S: Final = 900.0

OnGap = Literal["stop", "go-on"]

_OURS: Final = {
    "transactional.id": "the mirror's transactions are named after it, so that a restart finds them: use name=",
    "enable.idempotence": "a transaction always is",
    "acks": "a transaction always waits for every replica",
    "isolation.level": "a mirror reads everything and decides by the markers what is committed",
}


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """The options of one route. Each is described at `semel.mirror`."""

    name: str
    source: Mapping[str, object] = field(repr=False)
    target: Mapping[str, object] = field(repr=False)
    topics: re.Pattern[str]
    rename: str = "{topic}"
    groups: re.Pattern[str] | None = None
    lost: OnGap = "stop"
    recreated: OnGap = "stop"
    cut_bytes: int = CUT_BYTES
    buffer_bytes: int = BUFFER_BYTES
    follow_s: float = 10.0
    groups_s: float = 1.0
    retry_s: float = RETRY_S

    def includes(self, topic: str) -> bool:
        """Whether a topic of the source is mirrored. Kafka's own topics and those of mirrors never are."""
        return not topic.startswith(("__", "semel-mirror-")) and self.topics.fullmatch(topic) is not None

    def target_topic(self, topic: str) -> str:
        return self.rename.replace("{topic}", topic)


def make_options(
    name: str,
    source: Mapping[str, object],
    target: Mapping[str, object],
    topics: str | Iterable[str],
    *,
    rename: str = "{topic}",
    groups: str | None = ".*",
    lost: OnGap = "stop",
    recreated: OnGap = "stop",
    cut_bytes: int = CUT_BYTES,
    buffer_bytes: int = BUFFER_BYTES,
    follow_s: float = 10.0,
    groups_s: float = 1.0,
    retry_s: float = RETRY_S,
) -> MirrorOptions:
    """A mistake raises `ConfigError` before anything is read."""
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"name={name!r} cannot name a mirror: it must be text, not empty, and without '/'.")
    if rename.count("{topic}") != 1:
        raise ConfigError(f'rename={rename!r} must have {{topic}} in it once, such as "west.{{topic}}".')
    for option, value, allowed in (
        ("lost", lost, get_args(OnGap)),
        ("recreated", recreated, get_args(OnGap)),
    ):
        if value not in allowed:
            raise ConfigError(f"{option}={value!r} is not supported: write {' or '.join(map(repr, allowed))}.")
    if cut_bytes < 1 or buffer_bytes < 1 or follow_s <= 0 or groups_s <= 0 or retry_s < 0:
        raise ConfigError("cut_bytes, buffer_bytes, follow_s, groups_s and retry_s must be positive.")
    for settings in (source, target):
        for written in settings:
            if (reason := _OURS.get(written.replace("_", "."))) is not None:
                raise ConfigError(f"{written} cannot be set here: {reason}.")
        parse_config(settings)
    return MirrorOptions(
        name=name,
        source=source,
        target=target,
        topics=_pattern("topics", topics if isinstance(topics, str) else "|".join(map(re.escape, topics))),
        rename=rename,
        groups=None if groups is None else _pattern("groups", groups),
        lost=lost,
        recreated=recreated,
        cut_bytes=cut_bytes,
        buffer_bytes=buffer_bytes,
        follow_s=follow_s,
        groups_s=groups_s,
        retry_s=retry_s,
    )


def _pattern(option: str, text: str) -> re.Pattern[str]:
    if not text:
        raise ConfigError(f"{option}= names nothing: write a regular expression such as 'orders|payments.*'.")
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"{option}={text!r} is no regular expression: {error}.") from error
