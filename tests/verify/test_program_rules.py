"""Rules between the topics of a user's program, on hand-written records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from semel.errors import ConfigError
from semel.verify import Finding, TopicRecord
from semel.verify.programs.rules import compared_with, parse_rule
from semel.verify.programs.user_functions import checked_generator, load_function, plain_generator


def orders(count: int, *, keys: int = 1) -> list[TopicRecord]:
    return [TopicRecord("orders", 0, n, f"k{n % keys}".encode(), f"v{n}".encode()) for n in range(count)]


def invoices(numbers: Sequence[int], *, keys: int = 1, topic: str = "invoices") -> list[TopicRecord]:
    return [
        TopicRecord(topic, 0, offset, f"k{n % keys}".encode(), f"v{n}".encode()) for offset, n in enumerate(numbers)
    ]


def kinds(rule: str, inputs: list[TopicRecord], outputs: list[TopicRecord], *topics: str) -> Counter[str]:
    return Counter(one.kind for one in parse_rule(rule, topics or ("invoices",))(inputs, outputs))


@pytest.mark.parametrize(
    ("numbers", "found"),
    [
        ([0, 1, 2, 3], {}),
        ([0, 1, 3], {"lost": 1}),
        ([0, 1, 2, 3, 3], {"repeated": 1}),
        ([0, 1, 2, 0, 1, 2, 3], {"repeated": 3}),
        ([0, 2, 1, 3], {"out_of_order": 1}),
        ([0, 1, 2, 7], {"lost": 1, "wrong": 1}),
        ([], {"lost": 4}),
    ],
)
def test_a_copy_has_each_record_once_and_in_the_order_of_its_key(numbers: list[int], found: dict[str, int]) -> None:
    """Repeats of a whole portion are repeats, not disorder."""
    assert kinds("copy", orders(4), invoices(numbers)) == found


def test_records_of_different_keys_or_partitions_have_no_order() -> None:
    """Kafka promises none, so that a program cannot either."""
    assert kinds("copy", orders(4, keys=4), invoices([3, 2, 1, 0], keys=4)) == {}
    inputs = [TopicRecord("orders", n, 0, b"k0", f"v{n}".encode()) for n in range(2)]
    assert kinds("copy", inputs, invoices([1, 0])) == {}
    unkeyed = [TopicRecord("orders", 0, n, None, f"v{n}".encode()) for n in range(2)]
    swapped = [TopicRecord("invoices", 0, n, None, f"v{1 - n}".encode()) for n in range(2)]
    assert kinds("copy", unkeyed, swapped) == {}


def test_equal_inputs_ask_for_as_many_outputs() -> None:
    """A generator of the user's may make equal records; their number still counts."""
    same = [TopicRecord("orders", 0, n, b"k", b"v") for n in range(3)]
    outputs = [TopicRecord("invoices", 0, n, b"k", b"v") for n in range(4)]
    assert kinds("copy", same, outputs[:3]) == {}
    assert kinds("copy", same, outputs[:2]) == {"lost": 1}
    assert kinds("copy", same, outputs) == {"repeated": 1}


def test_a_record_in_one_of_two_topics_is_torn() -> None:
    """It is lost in the other one, too."""
    outputs = [*invoices([0, 1]), *invoices([0], topic="parcels")]
    assert kinds("copy", orders(2), outputs, "invoices", "parcels") == {"lost": 1, "torn": 1}
    assert kinds("copy", orders(2), invoices([0]), "invoices", "parcels") == {"lost": 2, "torn": 1}


def test_a_key_wise_rule_says_what_is_expected_of_each_record() -> None:
    """Text and JSON are compared for what they mean; a record may have no output, or several."""

    def expect(key: bytes | None, value: bytes | None) -> list[tuple[object, ...]]:
        number = int((value or b"")[1:])
        return [("invoices", key, {"n": number, "double": 2 * number})] if number % 2 else []

    inputs = orders(4)
    outputs = [
        TopicRecord("invoices", 0, 0, b"k0", b'{"double": 2, "n":1}'),
        TopicRecord("invoices", 0, 1, b"k0", json.dumps({"n": 3, "double": 7}).encode()),
    ]
    found = list(compared_with(expect, ["invoices"])(inputs, outputs))
    assert [(one.kind, one.records[0].offset) for one in found] == [("lost", 3), ("wrong", 1)]
    assert list(compared_with(expect, ["invoices"])(inputs[:2], outputs[:1])) == []


def test_a_finding_names_topic_partition_offset_and_key() -> None:
    """What a user searches for."""
    [finding] = parse_rule("copy", ["invoices"])(orders(1), [])
    assert finding.text == "Lost: orders-0 offset 0 key 'k0' has no output in invoices."


def test_an_output_with_another_key_than_expected_says_so() -> None:
    """Forgetting the key is the commonest mistake of a copy."""
    found = list(parse_rule("copy", ["invoices"])(orders(1), [TopicRecord("invoices", 0, 0, None, b"v0")]))
    assert [one.kind for one in found] == ["lost", "wrong"]
    assert found[1].text.endswith("One asks for this value with the key 'k0'.")


def test_functions_are_found_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m` finds modules."""
    (tmp_path / "my_rules_of_test.py").write_text(
        "from semel.verify import Finding\n"
        "def expect(key, value): return [(key, value.upper())]\n"
        "def check(inputs, outputs): return [Finding('too_few', 'too few')] if len(outputs) < len(inputs) else []\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    whole, each = parse_rule("my_rules_of_test:check", ["out"]), parse_rule("key=my_rules_of_test:expect", ["out"])
    assert list(whole(orders(1), [])) == [Finding("too_few", "too few")]
    assert list(each([TopicRecord("in", 0, 0, b"k", b"a")], [TopicRecord("out", 0, 0, b"k", b"A")])) == []


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("copies", "There is no rule 'copies'"),
        ("key", "needs a function"),
        ("key=nothing", "is no function"),
        ("sum=json:dumps", "There is no rule"),
        ("no_such_module:f", "cannot be imported"),
        ("json:no_such_function", "no function of the module json"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule: str, said: str) -> None:
    """At once, before anything is started."""
    with pytest.raises(ConfigError, match=said):
        parse_rule(rule, ["out"])


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ([("parcels", b"k", b"v")], "no output topic"),
        ([(b"v",)], "return"),
        ([(b"k", 7)], "as a key or a value"),
    ],
)
def test_what_a_key_wise_rule_must_not_return_is_named(expected: list[tuple[object, ...]], said: str) -> None:
    """A mistake in the rule must not look like one of the program."""
    with pytest.raises(ConfigError, match=said):
        list(compared_with(lambda key, value: expected, ["invoices"])(orders(1), []))


def test_generated_records_are_the_same_for_a_seed_and_all_different() -> None:
    """Each has an id of its own, and about the wanted size."""
    make, again = (plain_generator(5, keys=10, record_bytes=200) for _ in range(2))
    records = [make(number) for number in range(300)]
    assert records == [again(number) for number in range(300)]
    assert len({value for _, value, _ in records}) == 300
    assert {len(value) for _, value, _ in records} == {200}


def test_a_users_generator_may_leave_headers_out_and_must_return_a_record() -> None:
    """Text is taken as UTF-8."""
    assert checked_generator(lambda number: ("k", f"v{number}"))(3) == (b"k", b"v3", [])
    assert checked_generator(lambda number: (None, b"v", {"trace": b"1"}))(3) == (None, b"v", [("trace", b"1")])
    wrong: list[Any] = ["text", (1, b"v"), (b"k",)]
    for number in range(len(wrong)):
        with pytest.raises(ConfigError, match="The generator returned"):
            checked_generator(wrong.__getitem__)(number)
    assert load_function("json:loads", "--generator")("[1]") == [1]
