"""Who may do what: access control lists by Kafka's rules, with their persistence. No socket and no clock."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from typing import Final, Protocol

from kio.schema.errors import ErrorCode

from semel.broker.listeners import plain_address
from semel.broker.pacing import ChangeLock, Slices, WriteAside, finish_now, write_now
from semel.core.refusal import Refused

CLUSTER_NAME: Final = "kafka-cluster"
ANYTHING: Final = "*"
ANYBODY: Final = "User:*"
META_NAME: Final = "acls.json"

# A client that asks for ever new names (say, in Metadata) must not grow the broker's memory.
CACHE_ENTRIES_MAX: Final = 20_000
CACHED_NAME_CHARACTERS_MAX: Final = 255

RULES_MAX: Final = 10_000
"""The default of `semel.acls.max`. Each change of them writes all of them."""
RULES_BYTES_MAX: Final = 16 << 20
_RULE_BYTES: Final = 700
"""About what a binding takes besides its texts."""
_MATCHED_AT_ONCE: Final = 5_000
_MATCHED_WITHOUT_PAUSE: Final = 100


class Operation(IntEnum):
    """What is asked for. `ANY` and `UNKNOWN` stand in filters only."""

    UNKNOWN = 0
    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class ResourceType(IntEnum):
    """What it is asked for on. The only resource of type `CLUSTER` is named `kafka-cluster`."""

    UNKNOWN = 0
    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(IntEnum):
    """How a binding's name is meant. `ANY` and `MATCH` (whatever would apply to that name) stand in filters only."""

    UNKNOWN = 0
    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Permission(IntEnum):
    """What a binding says. `ANY` stands in filters only."""

    UNKNOWN = 0
    ANY = 1
    DENY = 2
    ALLOW = 3


# Only an ALLOW implies these: who may not read a topic may still be allowed to see that it exists.
IMPLIED_BY: Final[Mapping[Operation, frozenset[Operation]]] = {
    Operation.DESCRIBE: frozenset({Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.ALTER_CONFIGS}),
}

OPERATIONS_ON: Final[Mapping[ResourceType, frozenset[Operation]]] = {
    ResourceType.TOPIC: frozenset(
        {
            Operation.READ,
            Operation.WRITE,
            Operation.CREATE,
            Operation.DELETE,
            Operation.ALTER,
            Operation.DESCRIBE,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
        }
    ),
    ResourceType.GROUP: frozenset(
        {
            Operation.READ,
            Operation.DELETE,
            Operation.DESCRIBE,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
        }
    ),
    ResourceType.CLUSTER: frozenset(
        {
            Operation.CREATE,
            Operation.ALTER,
            Operation.DESCRIBE,
            Operation.CLUSTER_ACTION,
            Operation.DESCRIBE_CONFIGS,
            Operation.ALTER_CONFIGS,
            Operation.IDEMPOTENT_WRITE,
        }
    ),
    ResourceType.TRANSACTIONAL_ID: frozenset({Operation.WRITE, Operation.DESCRIBE, Operation.TWO_PHASE_COMMIT}),
}


@dataclass(frozen=True, slots=True, order=True)
class AclBinding:
    """One rule: `permission` for `principal` coming from `host` to do `operation` on the resources named.

    >>> AclBinding(ResourceType.TOPIC, "orders", PatternType.PREFIXED, "User:ann", operation=Operation.READ).host
    '*'
    """

    resource_type: ResourceType
    name: str
    pattern_type: PatternType = PatternType.LITERAL
    principal: str = ANYBODY
    host: str = ANYTHING
    operation: Operation = Operation.ALL
    permission: Permission = Permission.ALLOW


_ByPrincipal = dict[str, list[AclBinding]]
_ORDER: Final = attrgetter(*AclBinding.__slots__)


@dataclass(frozen=True, slots=True)
class AclFilter:
    """Picks bindings: `ANY` and None match everything; `PatternType.MATCH` picks those that apply to `name`.

    >>> binding = AclBinding(ResourceType.TOPIC, "ord", PatternType.PREFIXED)
    >>> AclFilter(ResourceType.TOPIC, "orders", PatternType.MATCH).matches(binding)
    True
    >>> AclFilter(ResourceType.TOPIC, "orders", PatternType.PREFIXED).matches(binding)
    False
    """

    resource_type: ResourceType = ResourceType.ANY
    name: str | None = None
    pattern_type: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    def matches(self, binding: AclBinding) -> bool:
        return (
            self.resource_type in (ResourceType.ANY, binding.resource_type)
            and self.principal in (None, binding.principal)
            and self.host in (None, binding.host)
            and self.operation in (Operation.ANY, binding.operation)
            and self.permission in (Permission.ANY, binding.permission)
            and self._matches_name(binding)
        )

    def _matches_name(self, binding: AclBinding) -> bool:
        if self.pattern_type is PatternType.MATCH and self.name is not None:
            if binding.pattern_type is PatternType.PREFIXED:
                return self.name.startswith(binding.name)
            return binding.name in (self.name, ANYTHING)
        return self.name in (None, binding.name) and (
            self.pattern_type in (PatternType.ANY, PatternType.MATCH, binding.pattern_type)
        )


class Requester(Protocol):
    """Who asks, from where: the part of a request's context that matters here."""

    @property
    def principal(self) -> str: ...
    @property
    def host(self) -> str: ...


class MetaStore(Protocol):
    """Small named values that are replaced whole, and are on disk when `write_meta` returns."""

    def read_meta(self, name: str, /) -> bytes | None: ...
    def write_meta(self, name: str, content: bytes, /) -> None: ...


class Authorizer:
    """Decides by the bindings it holds, as Kafka's StandardAuthorizer does. With a store, bindings outlive a restart.

    A DENY that matches wins over any ALLOW. Without a match the answer is no, except that with `allow_if_no_acl`
    (`allow.everyone.if.no.acl.found`) a resource to which no binding of anybody applies is open to all. Super users
    may do everything.

    >>> from types import SimpleNamespace
    >>> ann = SimpleNamespace(principal="User:ann", host="127.0.0.1")
    >>> authorizer = Authorizer(super_users=["User:admin"])
    >>> authorizer.add([AclBinding(ResourceType.TOPIC, "orders", principal="User:ann", operation=Operation.WRITE)])
    >>> authorizer.allows(ann, Operation.DESCRIBE, ResourceType.TOPIC, "orders")
    True
    >>> authorizer.allows(ann, Operation.READ, ResourceType.TOPIC, "orders")
    False
    """

    is_configured = True

    def __init__(
        self,
        super_users: Collection[str] = (),
        allow_if_no_acl: bool = False,
        store: MetaStore | None = None,
        *,
        rules_max: int = RULES_MAX,
        bytes_max: int = RULES_BYTES_MAX,
        write_aside: WriteAside = write_now,
    ) -> None:
        """`rules_max` and `bytes_max` bound what can be added; what a store holds is taken over in any case."""
        self._super_users = frozenset(super_users)
        self._allow_if_no_acl = allow_if_no_acl
        self._store = store
        self._write_aside = write_aside
        self._lock = ChangeLock()
        self._rules_max = rules_max
        self._bytes_max = bytes_max
        self._held_bytes = 0
        self._lines: dict[AclBinding, str] = {}
        """All bindings in the order in which they came, each as it stands in the file."""
        self._literal: dict[tuple[ResourceType, str], _ByPrincipal] = {}
        self._prefixed: dict[tuple[ResourceType, str], _ByPrincipal] = {}
        self._prefix_lengths: dict[ResourceType, list[int]] = {}
        self._answers: dict[tuple[str, str, int, int, str | None], bool] = {}
        stored = store.read_meta(META_NAME) if store else None
        if stored is not None:
            self._replay(lines_of(_from_json(stored)))

    @property
    def bindings(self) -> frozenset[AclBinding]:
        return frozenset(self._lines)

    # -- questions -----------------------------------------------------------------------------------------------------

    def allows(self, context: Requester, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        """Whether the requester may do that to the resource."""
        key = (context.principal, context.host, operation.value, resource_type.value, name)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._decide(context.principal, context.host, operation, resource_type, name)
            self._remember(key, answer)
        return answer

    def allows_any(self, context: Requester, operation: Operation, resource_type: ResourceType) -> bool:
        """Whether there is, or could be, a resource of that type to which the requester may do that.

        Who may write to any topic at all may ask for a producer id (KIP-679).
        """
        key = (context.principal, context.host, operation.value, resource_type.value, None)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._decide_any(context, operation, resource_type)
            self._remember(key, answer)
        return answer

    def operations(self, context: Requester, resource_type: ResourceType, name: str) -> int:
        """What the requester may do, as the bit field of "authorized operations" in answers (KIP-430)."""
        possible = OPERATIONS_ON.get(resource_type, frozenset[Operation]())
        return sum(1 << each.value for each in possible if self.allows(context, each, resource_type, name))

    def find(self, chosen: AclFilter) -> list[AclBinding]:
        """The bindings that a filter picks, in a stable order."""
        return finish_now(self.find_in_slices(chosen))

    def find_in_slices(self, chosen: AclFilter) -> Slices[list[AclBinding]]:
        """The same, where others may have their turns: there may be thousands."""
        found: list[AclBinding] = []
        for number, binding in enumerate(list(self._lines)):
            if number % _MATCHED_AT_ONCE == _MATCHED_AT_ONCE - 1:
                yield
            if chosen.matches(binding):
                found.append(binding)
        return sorted(found, key=_ORDER)

    # -- changes -------------------------------------------------------------------------------------------------------

    def add(self, bindings: Iterable[AclBinding]) -> None:
        """Adds bindings; those already there are left as they are. A failing store raises, and nothing is added."""
        finish_now(self.add_lines(lines_of(bindings)))

    def add_lines(self, lines: Mapping[AclBinding, str]) -> Slices[None]:
        """The same in slices for bindings that `lines_of` has written already. Raises Refused if they are too many."""
        return self._lock.hold(lambda: self._add(lines))

    def _add(self, lines: Mapping[AclBinding, str]) -> Slices[None]:
        added = {binding: line for binding, line in lines.items() if binding not in self._lines}
        count, held_bytes = len(self._lines) + len(added), self._held_bytes + _bytes_of(added)
        if added and (count > self._rules_max or held_bytes > self._bytes_max):
            raise Refused(
                ErrorCode.policy_violation,
                f"There are {len(self._lines):,} ACLs of about {self._held_bytes:,} bytes. With {len(added):,} more "
                f"they would be over semel.acls.max ({self._rules_max:,}), or over their share of "
                f"semel.client.memory.max.bytes ({self._bytes_max:,}). None was added. Use prefixes, remove ACLs, or "
                "raise these settings.",
            )
        yield from self._change(added, ())

    def remove(self, filters: Sequence[AclFilter]) -> list[list[AclBinding]]:
        """Removes what any of the filters picks; the answer lists, for each filter, what it picked."""
        return finish_now(self.remove_in_slices(filters))

    def remove_in_slices(self, filters: Sequence[AclFilter]) -> Slices[list[list[AclBinding]]]:
        """The same, where others may have their turns between the filters."""
        return self._lock.hold(lambda: self._remove(filters))

    def _remove(self, filters: Sequence[AclFilter]) -> Slices[list[list[AclBinding]]]:
        removed: list[list[AclBinding]] = []
        for chosen in filters:
            found = yield from self.find_in_slices(chosen)
            removed.append(found)
            if len(self._lines) > _MATCHED_WITHOUT_PAUSE:
                yield
        gone = {binding for found in removed for binding in found}
        if len(gone) > _MATCHED_WITHOUT_PAUSE:
            yield
        yield from self._change({}, gone)
        return removed

    def _change(self, added: Mapping[AclBinding, str], removed: Collection[AclBinding]) -> Slices[None]:
        kept = {binding: line for binding, line in self._lines.items() if binding not in removed} if removed else None
        if not added and (kept is None or len(kept) == len(self._lines)):
            return
        # On disk first: a rule that was in force, and is forgotten by a restart, would be a hole.
        if store := self._store:
            lines = [*(self._lines if kept is None else kept).values(), *added.values()]
            yield from self._write_aside(lambda: store.write_meta(META_NAME, _to_json(lines)))
        if kept is not None:
            self._lines, self._literal, self._prefixed, self._held_bytes = {}, {}, {}, 0
        self._replay(added if kept is None else {**kept, **added})

    def _replay(self, added: Mapping[AclBinding, str]) -> None:
        for binding in added:
            rules = self._index_of(binding).setdefault((binding.resource_type, binding.name), {})
            rules.setdefault(binding.principal, []).append(binding)
        self._lines.update(added)
        self._held_bytes += _bytes_of(added)
        lengths: dict[ResourceType, set[int]] = {}
        for resource_type, prefix in self._prefixed:
            lengths.setdefault(resource_type, set()).add(len(prefix))
        self._prefix_lengths = {resource_type: sorted(each) for resource_type, each in lengths.items()}
        self._answers.clear()

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _remember(self, key: tuple[str, str, int, int, str | None], answer: bool) -> None:
        if len(key[-1] or "") > CACHED_NAME_CHARACTERS_MAX:
            return
        if len(self._answers) >= CACHE_ENTRIES_MAX:
            self._answers.clear()
        self._answers[key] = answer

    def _index_of(self, binding: AclBinding) -> dict[tuple[ResourceType, str], _ByPrincipal]:
        return self._prefixed if binding.pattern_type is PatternType.PREFIXED else self._literal

    def _applying(self, resource_type: ResourceType, name: str) -> Iterator[_ByPrincipal]:
        """What applies to a resource: the bindings of each pattern that matches its name, by principal."""
        yield self._literal.get((resource_type, name), {})
        if name != ANYTHING:
            yield self._literal.get((resource_type, ANYTHING), {})
        for length in self._prefix_lengths.get(resource_type, ()):
            if length > len(name):
                break
            yield self._prefixed.get((resource_type, name[:length]), {})

    def _decide(self, principal: str, host: str, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        if principal in self._super_users:
            return True
        host = _address(host)
        is_allowed, has_bindings = False, False
        for rules in self._applying(resource_type, name):
            has_bindings |= bool(rules)
            for binding in (*rules.get(principal, ()), *(rules.get(ANYBODY, ()) if principal != ANYBODY else ())):
                if not _concerns(binding, principal, host) or not _covers(binding, operation):
                    continue
                if binding.permission is Permission.DENY:
                    return False
                is_allowed = True
        return is_allowed if has_bindings else self._allow_if_no_acl

    def _decide_any(self, context: Requester, operation: Operation, resource_type: ResourceType) -> bool:
        # Kafka's own question, with this very name: it lets super users in, and everybody where no binding applies.
        if self._decide(context.principal, context.host, operation, resource_type, "hardcode"):
            return True
        exact, host = (operation, Operation.ALL), _address(context.host)
        ours = [
            binding
            for binding in self._lines
            if binding.resource_type is resource_type
            and binding.operation in exact
            and _concerns(binding, context.principal, host)
        ]
        allowed = [binding for binding in ours if binding.permission is Permission.ALLOW]
        denied = {(each.pattern_type, each.name) for each in ours if each.permission is Permission.DENY}
        if (PatternType.LITERAL, ANYTHING) in denied:
            return False
        return any(not _is_overruled(binding, denied) for binding in allowed)


class AllowAll(Authorizer):
    """Used when no authorizer is configured: everything is allowed, and ACL requests are answered SECURITY_DISABLED.

    >>> AllowAll().operations(None, ResourceType.TRANSACTIONAL_ID, "t") == 1 << 4 | 1 << 8 | 1 << 15
    True
    """

    is_configured = False

    def __init__(self) -> None:
        super().__init__()

    def allows(self, context: Requester | None, operation: Operation, resource_type: ResourceType, name: str) -> bool:
        return True

    def allows_any(self, context: Requester | None, operation: Operation, resource_type: ResourceType) -> bool:
        return True

    def operations(self, context: Requester | None, resource_type: ResourceType, name: str) -> int:
        return sum(1 << each.value for each in OPERATIONS_ON.get(resource_type, ()))


@lru_cache(maxsize=1000)
def _address(host: str) -> str:
    """Kafka shows a client's host as "/127.0.0.1", and compares bare addresses in its rules.

    An address has many spellings, such as ::ffff:127.0.0.1 and 127.0.0.1: a rule for one is a rule for all.
    """
    return plain_address(host.removeprefix("/"))


def _concerns(binding: AclBinding, principal: str, host: str) -> bool:
    return binding.principal in (principal, ANYBODY) and (binding.host == ANYTHING or _address(binding.host) == host)


def _covers(binding: AclBinding, operation: Operation) -> bool:
    if binding.operation in (operation, Operation.ALL):
        return True
    return binding.permission is Permission.ALLOW and binding.operation in IMPLIED_BY.get(operation, ())


def _is_overruled(allowed: AclBinding, denied: set[tuple[PatternType, str]]) -> bool:
    """Whether a DENY takes away everything that this ALLOW gives. One for every name does not overrule "*" itself."""
    if allowed.pattern_type is PatternType.LITERAL:
        if allowed.name == ANYTHING:
            return False
        if (PatternType.LITERAL, allowed.name) in denied:
            return True
    return any((PatternType.PREFIXED, allowed.name[:end]) in denied for end in range(1, len(allowed.name) + 1))


def lines_of(bindings: Iterable[AclBinding]) -> dict[AclBinding, str]:
    """Each binding once, with its line in the file."""
    return {
        binding: json.dumps(
            {
                "resource_type": binding.resource_type.name,
                "name": binding.name,
                "pattern_type": binding.pattern_type.name,
                "principal": binding.principal,
                "host": binding.host,
                "operation": binding.operation.name,
                "permission": binding.permission.name,
            }
        )
        for binding in bindings
    }


def _bytes_of(lines: Mapping[AclBinding, str]) -> int:
    """About what bindings take in memory."""
    return sum(
        _RULE_BYTES + len(line) + sum(map(sys.getsizeof, (binding.name, binding.principal, binding.host)))
        for binding, line in lines.items()
    )


def _to_json(lines: Sequence[str]) -> bytes:
    return ('{"version": 1, "acls": [\n' + ",\n".join(lines) + "\n]}\n").encode()


def _from_json(content: bytes) -> Iterator[AclBinding]:
    for row in json.loads(content)["acls"]:
        yield AclBinding(
            ResourceType[row["resource_type"]],
            row["name"],
            PatternType[row["pattern_type"]],
            row["principal"],
            row["host"],
            Operation[row["operation"]],
            Permission[row["permission"]],
        )
