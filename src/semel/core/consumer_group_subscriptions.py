"""What KIP-848 members subscribe to: regular expressions made into topic names, and a hash that shows a change.

A name must match as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from uuid import UUID

from kio.schema.errors import ErrorCode

from semel.core.consumer_group_records import ResolvedRegex
from semel.core.linear_regex import Budget, LinearRegex, UnusableRegex
from semel.core.refusal import Refused

# Topic id and number of partitions by topic name.
Topics = Mapping[str, tuple[UUID, int]]


@lru_cache(maxsize=16)
def compile_regex(regex: str) -> LinearRegex:
    """Compile, or refuse with INVALID_REGULAR_EXPRESSION."""
    try:
        return LinearRegex(regex)
    except UnusableRegex as error:
        raise _unusable(regex, error) from error


def _matching(regex: str, names: Iterable[str], budget: Budget) -> list[str]:
    try:
        return compile_regex(regex).select(names, budget)
    except UnusableRegex as error:
        raise _unusable(regex, error) from error


def _unusable(regex: str, error: UnusableRegex) -> Refused:
    return Refused(
        ErrorCode.invalid_regular_expression, f"SubscribedTopicRegex {regex[:100]!r} is not a valid expression: {error}"
    )


def resolve(
    regexes: Iterable[str],
    known: Mapping[str, ResolvedRegex],
    topics: Topics,
    may_describe: Callable[[str], bool],
    now_ms: int,
    refresh_interval_ms: int,
) -> dict[str, ResolvedRegex]:
    """The expressions that must be tried again and what they match: unknown ones, and all after topics changed.

    After the interval they are tried even if no topic came or went, since the rights to see topics may have changed.
    One heartbeat has one budget of work. Unknown expressions come first and are refused when it does not suffice. What
    is left goes to the known ones, the oldest first; those that get no turn keep their matches until the next one.
    """
    version = _hash64(sorted(topics))
    outdated = sorted(
        (regex for regex in regexes if _is_outdated(known.get(regex), version, now_ms - refresh_interval_ms)),
        key=lambda regex: (known[regex].timestamp_ms if regex in known else -1, regex),
    )
    if not outdated:
        return {}
    budget = Budget()
    names = [name for name in sorted(topics) if may_describe(name)]
    resolved: dict[str, ResolvedRegex] = {}
    for regex in outdated:
        if resolved and regex in known and budget.is_spent:
            break
        try:
            resolved[regex] = ResolvedRegex(tuple(_matching(regex, names, budget)), version, now_ms)
        except Refused:
            if regex not in known or not resolved:
                raise
    return resolved


def _is_outdated(resolved: ResolvedRegex | None, version: int, oldest_ms: int) -> bool:
    return resolved is None or resolved.version != version or resolved.timestamp_ms <= oldest_ms


def hash_of_topics(names: Iterable[str], topics: Topics) -> int:
    """A number that changes when one of these topics is created, deleted, made anew or grown; 0 if none exists.

    It is kept with the group (KIP-1101), so that a change is noticed also across a restart.
    """
    seen = sorted((name, *topics[name]) for name in names if name in topics)
    return (
        _hash64(f"{name}/{topic_id.hex}/{partition_count}" for name, topic_id, partition_count in seen) if seen else 0
    )


def _hash64(parts: Iterable[str]) -> int:
    digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)
