"""Access control lists: Kafka's rules against a slow and obvious evaluator, filters, and what survives a restart."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from semel.broker import acls
from semel.broker.acls import AclBinding, AclFilter, AllowAll, Authorizer, Operation, PatternType, Permission
from semel.broker.acls import ResourceType as Type
from semel.core.refusal import Refused


@dataclass(frozen=True)
class Client:
    principal: str = "User:ann"
    host: str = "/10.0.0.1"


class MemoryMeta:
    """Small values in memory; `is_full` lets every write fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_full = False

    def read_meta(self, name: str) -> bytes | None:
        return self.values.get(name)

    def write_meta(self, name: str, content: bytes) -> None:
        if self.is_full:
            raise OSError("no space left")
        self.values[name] = content


def allow(operation: Operation, name: str = "orders", **fields: object) -> AclBinding:
    return AclBinding(**{"resource_type": Type.TOPIC, "name": name, "operation": operation, **fields})  # type: ignore[arg-type]


def deny(operation: Operation, name: str = "orders", **fields: object) -> AclBinding:
    return allow(operation, name, permission=Permission.DENY, **fields)


# Few values each, so that rules meet.
NAMES = st.sampled_from(["a", "ab", "abc", "b", "*"])
OPERATIONS = st.sampled_from(
    [
        Operation.ALL,
        Operation.READ,
        Operation.WRITE,
        Operation.DESCRIBE,
        Operation.ALTER_CONFIGS,
        Operation.DESCRIBE_CONFIGS,
    ]
)
BINDINGS = st.builds(
    AclBinding,
    resource_type=st.sampled_from([Type.TOPIC, Type.GROUP]),
    name=NAMES,
    pattern_type=st.sampled_from([PatternType.LITERAL, PatternType.PREFIXED]),
    principal=st.sampled_from(["User:ann", "User:bob", "User:*"]),
    host=st.sampled_from(["10.0.0.1", "10.0.0.2", "*"]),
    operation=OPERATIONS,
    permission=st.sampled_from([Permission.ALLOW, Permission.ALLOW, Permission.DENY]),
)
CLIENTS = st.builds(
    Client,
    principal=st.sampled_from(["User:ann", "User:bob", "User:admin"]),
    host=st.sampled_from(["/10.0.0.1", "10.0.0.2"]),
)
ASKED = st.sampled_from([each for each in Operation if each not in (Operation.UNKNOWN, Operation.ANY, Operation.ALL)])


def applies(binding: AclBinding, name: str) -> bool:
    if binding.pattern_type is PatternType.PREFIXED:
        return name.startswith(binding.name)
    return binding.name == "*" or binding.name == name


def grants(binding: AclBinding, operation: Operation) -> bool:
    given_by = {operation, Operation.ALL}
    if binding.permission is Permission.ALLOW and operation is Operation.DESCRIBE:
        given_by |= {Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}
    if binding.permission is Permission.ALLOW and operation is Operation.DESCRIBE_CONFIGS:
        given_by |= {Operation.ALTER_CONFIGS}
    return binding.operation in given_by


def slow_answer(bindings: set[AclBinding], client: Client, operation: Operation, name: str, *, if_no_acl: bool) -> bool:
    """Reads all the rules one after the other, as the documentation tells them."""
    if client.principal == "User:admin":
        return True
    here = [each for each in bindings if each.resource_type is Type.TOPIC and applies(each, name)]
    if not here:
        return if_no_acl
    ours = [
        each
        for each in here
        if each.principal in ("User:*", client.principal)
        and each.host in ("*", client.host.lstrip("/"))
        and grants(each, operation)
    ]
    verdicts = {each.permission for each in ours}
    return Permission.ALLOW in verdicts and Permission.DENY not in verdicts


@given(st.sets(BINDINGS, max_size=6), CLIENTS, ASKED, st.sampled_from(["a", "ab", "abcd", "b", "z"]), st.booleans())
def test_the_answer_is_that_of_the_obvious_evaluator(
    bindings: set[AclBinding], client: Client, operation: Operation, name: str, if_no_acl: bool
) -> None:
    """Index and cache change nothing: any set of rules gives the answer of reading them one by one, twice."""
    authorizer = Authorizer(["User:admin"], if_no_acl)
    authorizer.add(bindings)
    expected = slow_answer(bindings, client, operation, name, if_no_acl=if_no_acl)
    assert authorizer.allows(client, operation, Type.TOPIC, name) is expected
    assert authorizer.allows(client, operation, Type.TOPIC, name) is expected


@given(st.sets(BINDINGS, max_size=6), CLIENTS, st.sampled_from([Operation.READ, Operation.WRITE]))
def test_any_resource_is_allowed_when_some_name_is(
    bindings: set[AclBinding], client: Client, operation: Operation
) -> None:
    """`allows_any` says yes whenever one of many names is allowed, and never where no rule allows anything."""
    authorizer = Authorizer(["User:admin"])
    authorizer.add(bindings)
    names = ["a", "ab", "abc", "abcd", "b", "bz", "z", "*", "hardcode"]
    if any(authorizer.allows(client, operation, Type.TOPIC, name) for name in names):
        assert authorizer.allows_any(client, operation, Type.TOPIC)
    elif not any(each.permission is Permission.ALLOW for each in bindings):
        assert not authorizer.allows_any(client, operation, Type.TOPIC)


def test_an_idempotent_producer_needs_one_topic_to_write_to() -> None:
    """KIP-679: WRITE on some topic is enough, unless a DENY takes it away again."""
    authorizer = Authorizer()
    assert not authorizer.allows_any(Client(), Operation.WRITE, Type.TOPIC)
    authorizer.add([allow(Operation.WRITE, "orders", pattern_type=PatternType.PREFIXED)])
    assert authorizer.allows_any(Client(), Operation.WRITE, Type.TOPIC)
    assert not authorizer.allows_any(Client(), Operation.READ, Type.TOPIC)
    authorizer.add([deny(Operation.ALL, "ord", pattern_type=PatternType.PREFIXED)])
    assert not authorizer.allows_any(Client(), Operation.WRITE, Type.TOPIC)
    authorizer.add([allow(Operation.WRITE, "*")])
    assert authorizer.allows_any(Client(), Operation.WRITE, Type.TOPIC)
    authorizer.add([deny(Operation.WRITE, "*")])
    assert not authorizer.allows_any(Client(), Operation.WRITE, Type.TOPIC)


def test_a_denied_read_still_allows_to_describe() -> None:
    """What an ALLOW implies, a DENY does not take away: only DESCRIBE itself can be denied."""
    authorizer = Authorizer()
    authorizer.add([allow(Operation.WRITE), deny(Operation.READ)])
    assert authorizer.allows(Client(), Operation.DESCRIBE, Type.TOPIC, "orders")
    authorizer.add([deny(Operation.DESCRIBE)])
    assert not authorizer.allows(Client(), Operation.DESCRIBE, Type.TOPIC, "orders")


def test_a_transactional_id_is_guarded_by_its_own_rules() -> None:
    """A rule for a topic says nothing about a transactional id of the same name."""
    authorizer = Authorizer()
    authorizer.add([allow(Operation.WRITE, "etl")])
    assert not authorizer.allows(Client(), Operation.WRITE, Type.TRANSACTIONAL_ID, "etl-1")
    authorizer.add(
        [allow(Operation.WRITE, "etl", resource_type=Type.TRANSACTIONAL_ID, pattern_type=PatternType.PREFIXED)]
    )
    assert authorizer.allows(Client(), Operation.WRITE, Type.TRANSACTIONAL_ID, "etl-1")
    assert authorizer.operations(Client(), Type.TRANSACTIONAL_ID, "etl-1") == 1 << 4 | 1 << 8


def test_a_change_of_the_rules_is_seen_at_once() -> None:
    """Answers are remembered, and forgotten with every change."""
    authorizer = Authorizer()
    assert not authorizer.allows(Client(), Operation.READ, Type.TOPIC, "orders")
    authorizer.add([allow(Operation.READ)])
    assert authorizer.allows(Client(), Operation.READ, Type.TOPIC, "orders")
    assert authorizer.remove([AclFilter(name="orders"), AclFilter(name="other")]) == [[allow(Operation.READ)], []]
    assert not authorizer.allows(Client(), Operation.READ, Type.TOPIC, "orders")


def test_names_without_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of remembered answers is bounded, and the answers stay right."""
    monkeypatch.setattr(acls, "CACHE_ENTRIES_MAX", 10)
    authorizer = Authorizer()
    authorizer.add([allow(Operation.READ, "yes", pattern_type=PatternType.PREFIXED)])
    for number in range(50):
        assert authorizer.allows(Client(), Operation.READ, Type.TOPIC, f"yes-{number}")
        assert not authorizer.allows(Client(), Operation.READ, Type.TOPIC, f"no-{number}")
    assert len(authorizer._answers) <= 10  # pyright: ignore[reportPrivateUsage]


@given(st.sets(BINDINGS, max_size=8))
def test_rules_survive_a_restart(bindings: set[AclBinding]) -> None:
    """What was added is there again when another authorizer reads the same store."""
    meta = MemoryMeta()
    Authorizer(store=meta).add(bindings)
    assert Authorizer(store=meta).bindings == bindings


def test_a_full_disk_changes_nothing() -> None:
    """A rule that could not be stored is not in force either, and one that could not be removed stays."""
    meta = MemoryMeta()
    authorizer = Authorizer(store=meta)
    authorizer.add([allow(Operation.READ)])
    meta.is_full = True
    with pytest.raises(OSError, match="no space"):
        authorizer.add([deny(Operation.READ)])
    with pytest.raises(OSError, match="no space"):
        authorizer.remove([AclFilter()])
    assert authorizer.bindings == {allow(Operation.READ)}
    assert authorizer.allows(Client(), Operation.READ, Type.TOPIC, "orders")


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (AclFilter(), {"*", "ord", "orders", "other"}),
        (AclFilter(name="orders", pattern_type=PatternType.MATCH), {"*", "ord", "orders"}),
        (AclFilter(name="orders", pattern_type=PatternType.LITERAL), {"orders"}),
        (AclFilter(name="ord", pattern_type=PatternType.LITERAL), set[str]()),
        (AclFilter(name="ord"), {"ord"}),
        (AclFilter(pattern_type=PatternType.PREFIXED), {"ord"}),
        (AclFilter(pattern_type=PatternType.MATCH), {"*", "ord", "orders", "other"}),
        (AclFilter(principal="User:bob"), {"other"}),
        (AclFilter(host="10.0.0.1"), {"orders"}),
        (AclFilter(operation=Operation.WRITE), {"orders"}),
        (AclFilter(permission=Permission.DENY), {"*"}),
        (AclFilter(resource_type=Type.GROUP), {"other"}),
    ],
)
def test_filters_pick_what_kafka_picks(chosen: AclFilter, names: set[str]) -> None:
    """ANY matches all, MATCH what would apply to the name, and anything else itself only."""
    authorizer = Authorizer()
    authorizer.add(
        [
            deny(Operation.READ, "*"),
            allow(Operation.READ, "ord", pattern_type=PatternType.PREFIXED),
            allow(Operation.WRITE, "orders", host="10.0.0.1"),
            allow(Operation.READ, "other", principal="User:bob", resource_type=Type.GROUP),
        ]
    )
    assert {binding.name for binding in authorizer.find(chosen)} == names


def test_without_an_authorizer_everything_is_allowed() -> None:
    """The default: no rule is needed, and none counts."""
    authorizer = AllowAll()
    assert not authorizer.is_configured
    assert authorizer.allows(Client(), Operation.ALTER, Type.CLUSTER, "kafka-cluster")
    assert authorizer.allows_any(Client(), Operation.WRITE, Type.TOPIC)


def test_no_more_rules_are_taken_than_the_settings_allow() -> None:
    """Each change writes all of them, and all are held in memory. What is refused is refused whole, with a reason."""
    store = MemoryMeta()
    authorizer = Authorizer(store=store, rules_max=10)
    some = [AclBinding(Type.TOPIC, f"t{number}") for number in range(8)]
    authorizer.add(some)
    more = [AclBinding(Type.TOPIC, f"more-{number}") for number in range(3)]
    with pytest.raises(Refused, match=r"semel\.acls\.max") as refused:
        authorizer.add([*some, *more])
    assert refused.value.code is ErrorCode.policy_violation
    assert authorizer.bindings == set(some)
    authorizer.add([*some, *more[:2]])
    authorizer.remove([AclFilter(name="t0")])
    authorizer.add(more)
    assert authorizer.bindings == {*some[1:], *more}
    again = Authorizer(store=store, rules_max=1)
    assert again.bindings == authorizer.bindings, "a lower cap must not forget a rule that is in force"


def test_rules_with_long_names_take_more_of_the_memory() -> None:
    """Ten thousand names of 30 kB each would be 300 MB."""
    authorizer = Authorizer(bytes_max=100_000)
    authorizer.add([AclBinding(Type.TOPIC, f"{number}-" + "n" * 30_000) for number in range(1)])
    with pytest.raises(Refused, match="None was added"):
        authorizer.add([AclBinding(Type.TOPIC, "x" * 30_000)])
    authorizer.remove([AclFilter()])
    authorizer.add([AclBinding(Type.TOPIC, "x" * 30_000)])
