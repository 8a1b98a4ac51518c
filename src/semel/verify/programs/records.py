"""What rules for a user's own program work with: the records of its topics, and what they find in them.

A rule is a function of all inputs and all outputs that readers of committed records see, both by partition and offset.
It returns what it finds wrong, and nothing if all is well. `semel verify --command ... --rule my_rules:check`:

>>> from semel.verify import Finding, TopicRecord
>>> def check(inputs, outputs):
...     if len(outputs) > len(inputs):
...         yield Finding("repeated", f"{len(outputs)} outputs for {len(inputs)} inputs", tuple(outputs[-1:]))
>>> order = TopicRecord("orders", 0, 0, b"k", b"v")
>>> invoice = TopicRecord("invoices", 0, 0, b"k", b"v")
>>> [finding.kind for finding in check([order], [invoice, invoice])]
['repeated']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A record as readers of committed records see it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = -1

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition} offset {self.offset} key {_shown(self.key)}"

    def to_json(self) -> dict[str, Any]:
        return {
            "topic": self.topic,
            "partition": self.partition,
            "offset": self.offset,
            "key": None if self.key is None else self.key.decode(errors="replace"),
            "value": None if self.value is None else self.value.decode(errors="replace"),
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, in a sentence, and the records that show it."""

    kind: str
    """`lost`, `repeated`, `wrong`, `out_of_order`, `torn`, or a name of the rule's own."""
    text: str
    records: tuple[TopicRecord, ...] = ()


Rule = Callable[[Sequence[TopicRecord], Sequence[TopicRecord]], Iterable[Finding]]
"""All inputs and all committed outputs, each by topic, partition and offset."""

Expected = tuple[Any, ...]
"""An output that a key-wise rule expects: `(key, value)` or `(topic, key, value)`.

Key and value are `bytes`, `str` (taken as UTF-8) or None. A value that is a dict or a list is compared as JSON, so that
spaces and the order of fields do not matter.
"""

KeyRule = Callable[[bytes | None, bytes | None], Iterable[Expected]]
"""The outputs for one input, given its key and value."""

Generated = tuple[Any, ...]
"""An input: `(key, value)` or `(key, value, headers)`, with headers as a mapping or pairs of name and bytes."""

Generator = Callable[[int], Generated]
"""The input with this number, from 0 on."""

Headers = Mapping[str, bytes | None] | Iterable[tuple[str, bytes | None]]


def _shown(key: bytes | None) -> str:
    return "none" if key is None else repr(key.decode(errors="backslashreplace"))
