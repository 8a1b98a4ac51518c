"""Holds the outputs of a program against its inputs: what is lost, repeated, wrong, out of order or torn.

Pure: records in, findings out. Records are compared by topic, key and value. Where several inputs ask for equal
outputs, there must be as many of them as there are inputs.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from semel.errors import ConfigError
from semel.verify.programs.records import Expected, Finding, KeyRule, Rule, TopicRecord
from semel.verify.programs.user_functions import load_function

DEFINITIONS: Final[Mapping[str, str]] = {
    "lost": "The rule expects an output for an input record, and no reader of committed records sees it.",
    "repeated": "An output is visible more often than the rule expects it.",
    "wrong": "An output is visible that the rule expects for none of the input records.",
    "out_of_order": "Two records of one key and one input partition are in one output partition in the other order.",
    "torn": "An input record has its output in one of the topics and lacks it in another.",
    "dirty": "A reader of committed records was given a record that is not among the committed ones.",
    "hung": "The command was running, had input left, and wrote nothing more.",
    "keeps_failing": "The command fails each time it is started, though no fault is near.",
}

Identity = tuple[str, bytes | None, bytes | str | None]
"""Topic, key and value of an output; a value that is compared as JSON is a string here."""


def parse_rule(text: str, output_topics: Sequence[str]) -> Rule:
    """`copy`, `key=MODULE:FUNCTION`, or `MODULE:FUNCTION` for a function of all inputs and outputs.

    >>> [finding.kind for finding in parse_rule("copy", ["out"])([TopicRecord("in", 0, 0, b"k", b"v")], [])]
    ['lost']
    """
    if text == "copy":
        return compared_with(lambda key, value: [(topic, key, value) for topic in output_topics], output_topics)
    if text == "key":
        raise ConfigError("The rule key needs a function: write --rule key=MODULE:FUNCTION.")
    kind, equals, name = text.partition("=")
    if equals and kind.strip() == "key":
        return compared_with(load_function(name, "--rule"), output_topics)
    if equals or ":" not in text:
        raise ConfigError(f"There is no rule {text!r}: write copy, key=MODULE:FUNCTION or MODULE:FUNCTION.")
    return load_function(text, "--rule")


def compared_with(expect: KeyRule, output_topics: Sequence[str]) -> Rule:
    """The rule that each input has exactly the outputs that `expect` names for its key and value."""

    def rule(inputs: Sequence[TopicRecord], outputs: Sequence[TopicRecord]) -> Iterator[Finding]:
        comparison = _Comparison(inputs, outputs)
        for number, record in enumerate(inputs):
            for one in expect(record.key, record.value):
                comparison.expect(number, _identity(one, output_topics))
        yield from comparison.findings()

    return rule


def _identity(expected: Expected, output_topics: Sequence[str]) -> Identity:
    if len(expected) == 3:
        topic, key, value = expected
    elif len(expected) == 2 and len(output_topics) == 1:
        topic, (key, value) = output_topics[0], expected
    else:
        raise ConfigError(
            f"The rule returned {expected!r}: return (key, value), or (topic, key, value) if there are several topics."
        )
    if topic not in output_topics:
        raise ConfigError(f"The rule expects an output in {topic!r}, which is no output topic: name it with --output.")
    if isinstance(value, dict | list):
        return topic, _bytes(key), _canonical(value)
    return topic, _bytes(key), _bytes(value)


def _bytes(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise ConfigError(f"The rule returned {value!r} as a key or a value: return bytes, str or None (or JSON, as dict).")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


class _Comparison:
    """Numbers are indexes of inputs and outputs."""

    def __init__(self, inputs: Sequence[TopicRecord], outputs: Sequence[TopicRecord]) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._expected: dict[Identity, list[int]] = defaultdict(list)
        self._has_json = False

    def expect(self, number: int, identity: Identity) -> None:
        self._expected[identity].append(number)
        self._has_json = self._has_json or isinstance(identity[2], str)

    def findings(self) -> Iterator[Finding]:
        found, wrong = self._found()
        lost: dict[int, list[str]] = defaultdict(list)
        there: dict[int, list[str]] = defaultdict(list)
        firsts: list[tuple[int, int]] = []
        repeats: list[Finding] = []
        for identity, wanted in self._expected.items():
            got = found.get(identity, [])
            for number, output in zip(wanted, got, strict=False):
                there[number].append(identity[0])
                firsts.append((output, number))
            for number in wanted[len(got) :]:
                lost[number].append(identity[0])
            repeats += [self._repeated(wanted[-1], got[len(wanted) - 1], again) for again in got[len(wanted) :]]
        for number in sorted(lost):
            topics = ", ".join(dict.fromkeys(lost[number]))
            yield Finding("lost", f"Lost: {self._inputs[number]} has no output in {topics}.", (self._inputs[number],))
        yield from repeats
        keys = {(topic, value): key for topic, key, value in self._expected} if wrong else {}
        for number in wrong:
            yield self._wrong(self._outputs[number], keys)
        yield from self._out_of_order(sorted(firsts))
        for number in sorted(lost.keys() & there.keys()):
            seen, missing = set(there[number]), set(lost[number]) - set(there[number])
            if missing:
                text = f"Torn: {self._inputs[number]} is in {_names(seen)} and not in {_names(missing)}."
                yield Finding("torn", text, (self._inputs[number],))

    def _found(self) -> tuple[dict[Identity, list[int]], list[int]]:
        """The outputs by what they are, and those that nobody asked for."""
        found: dict[Identity, list[int]] = defaultdict(list)
        wrong: list[int] = []
        for number, output in enumerate(self._outputs):
            identity = (output.topic, output.key, output.value)
            if identity not in self._expected and self._has_json:
                identity = (output.topic, output.key, _as_json(output.value))
            if identity in self._expected:
                found[identity].append(number)
            else:
                wrong.append(number)
        return found, wrong

    def _wrong(self, output: TopicRecord, keys: Mapping[tuple[str, bytes | str | None], bytes | None]) -> Finding:
        text = f"Wrong: no input asks for {output}, value {_shown(output.value)}."
        for value in (output.value, _as_json(output.value)):
            if (output.topic, value) in keys:
                text += f" One asks for this value with the key {_shown(keys[output.topic, value])}."
                break
        return Finding("wrong", text, (output,))

    def _repeated(self, number: int, first: int, again: int) -> Finding:
        records = (self._inputs[number], self._outputs[first], self._outputs[again])
        text = f"Repeated: {records[0]} has its output at {_place(records[1])} and once more at {_place(records[2])}."
        return Finding("repeated", text, records)

    def _out_of_order(self, firsts: Sequence[tuple[int, int]]) -> Iterator[Finding]:
        """A record without a key has no promised order; what comes a second time is repeated, not out of order."""
        newest: dict[tuple[str, int, int, bytes], tuple[int, int]] = {}
        for output, number in firsts:
            came, record = self._outputs[output], self._inputs[number]
            if record.key is None:
                continue
            lane = (came.topic, came.partition, record.partition, record.key)
            before = newest.get(lane)
            if before is None or record.offset >= self._inputs[before[1]].offset:
                newest[lane] = (output, number)
                continue
            earlier, its_output = self._inputs[before[1]], self._outputs[before[0]]
            text = f"Out of order: {record} came at {_place(came)}, after offset {earlier.offset} of the same key."
            yield Finding("out_of_order", text, (record, came, earlier, its_output))


def _as_json(value: bytes | None) -> bytes | str | None:
    try:
        return value if value is None else _canonical(json.loads(value))
    except ValueError:
        return value


def _names(topics: set[str]) -> str:
    return ", ".join(sorted(topics))


def _place(record: TopicRecord) -> str:
    return f"{record.topic}-{record.partition} offset {record.offset}"


def _shown(value: bytes | None, bytes_max: int = 80) -> str:
    if value is None:
        return "none"
    return repr(value[:bytes_max].decode(errors="backslashreplace")) + ("..." if len(value) > bytes_max else "")
