"""Histories written by hand: a story of one line per row, in the order in which things happened.

A line is who, what, and then in any order: a transaction (`t0`), a partition with or without an offset (`orders-0@3`),
a record (`a7`: origin a, sequence 7), the writer (`by w`), a value (`=5`), in `ends` the high watermark (`/9`). What
begins with c or w is a writer, with r a reader, with u one that reads uncommitted.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from semel.verify.history import ROW, Act, History, Manifest, Phase, Process

PARTITIONS = ("orders-0", "orders-1", "copies-0", "copies-1")
WORDS = {
    "begin": (Act.BEGIN, Phase.OK),
    "send": (Act.SEND, Phase.INVOKE),
    "sent": (Act.SEND, Phase.OK),
    "send-failed": (Act.SEND, Phase.FAIL),
    "send-unknown": (Act.SEND, Phase.UNKNOWN),
    "consume": (Act.CONSUME, Phase.OK),
    "position": (Act.POSITION, Phase.OK),
    "commit": (Act.COMMIT, Phase.INVOKE),
    "committed": (Act.COMMIT, Phase.OK),
    "commit-failed": (Act.COMMIT, Phase.FAIL),
    "commit-unknown": (Act.COMMIT, Phase.UNKNOWN),
    "abort": (Act.ABORT, Phase.INVOKE),
    "aborted": (Act.ABORT, Phase.OK),
    "assign": (Act.ASSIGN, Phase.OK),
    "read": (Act.READ, Phase.OK),
    "damaged": (Act.READ, Phase.FAIL),
    "ends": (Act.ENDS, Phase.OK),
}
# Two rows in one line, where nothing happens in between.
PAIRS = {"wrote": ("send", "sent"), "commits": ("commit", "committed")}
MILLISECOND_NS = 1_000_000


def story(text: str, **manifest: Any) -> History:
    """The history that a story tells. A line is a millisecond."""
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    lines = [line for line in lines if line]
    names = list(dict.fromkeys(line[0] for line in lines))
    names += [name for line in lines for name in _writers(line) if name not in names]
    number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    rows: dict[str, list[tuple[int, ...]]] = {name: [] for name in number_of}
    for time, (name, word, *rest) in enumerate(lines):
        for one in PAIRS.get(word, (word,)):
            rows[name].append(_row(one, rest, time * MILLISECOND_NS, name, number_of))
    processes = [Process(number, name, *_role(name)) for name, number in number_of.items()]
    partitions = [(name.rsplit("-", 1)[0], int(name.rsplit("-", 1)[1])) for name in PARTITIONS]
    return History(Manifest(partitions, processes, **manifest), [np.array(mine, ROW) for mine in rows.values()])


def _row(word: str, rest: list[str], time_ns: int, name: str, number_of: dict[str, int]) -> tuple[int, ...]:
    act, phase = WORDS[word]
    columns = dict.fromkeys(ROW.names or (), -1) | {"time_ns": time_ns, "process": number_of[name]}
    if act is Act.SEND:
        columns["writer"] = number_of[name]
    words = iter(rest)
    for token in words:
        if token == "by":
            columns["writer"] = number_of[next(words)]
        elif match := re.fullmatch(r"t(\d+)", token):
            columns["transaction"] = int(match[1])
        elif match := re.fullmatch(r"([a-s])(\d+)", token):
            columns["origin"], columns["sequence"] = ord(match[1]) - ord("a"), int(match[2])
        elif match := re.fullmatch(r"(\w+-\d+)(?:@(\d+))?", token):
            columns["partition"] = PARTITIONS.index(match[1])
            # What is only asked for has no offset yet: `wrote` tells one for its second row.
            columns["offset"] = -1 if match[2] is None or word == "send" else int(match[2])
        elif token[0] in "=/":
            columns["value"] = int(token[1:])
        else:
            raise ValueError(f"What is {token!r}?")
    return (*(columns[column] for column in (ROW.names or ())[:-2]), act, phase)


def _writers(line: list[str]) -> list[str]:
    return [line[at + 1] for at, word in enumerate(line) if word == "by"]


def _role(name: str) -> tuple[Any, Any]:
    if name == "judge":
        return "judge", "read_committed"
    if name[0] in "cw":
        return "writer", "read_committed"
    return "reader", "read_uncommitted" if name[0] == "u" else "read_committed"
