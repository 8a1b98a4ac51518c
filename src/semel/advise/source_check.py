"""The rules about Python programs, read from their syntax tree. Only what is certain is reported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import combinations
from typing import Final, cast

from semel.advise.client_settings import ClientSettings
from semel.advise.rules import Finding, finding
from semel.advise.settings_check import check_settings
from semel.advise.source_clients import Client, changes_at_each_start, clients, is_made_several_times
from semel.advise.source_databases import find_write, uses_database
from semel.advise.source_spark import check_spark
from semel.advise.source_transactions import regions
from semel.advise.source_tree import SourceTree


def check_source(source: SourceTree, *, transaction_timeout_ms_max: int | None = None) -> Iterator[Finding]:
    """What is wrong in a program."""
    made = clients(source)
    for client in made:
        yield from check_settings(client.settings, transaction_timeout_ms_max=transaction_timeout_ms_max)
        yield from _check_idempotence(source, client)
    yield from _check_ids(source, made)
    yield from _check_loop(source, made)
    yield from _check_databases(source)
    yield from _check_http(source)
    yield from check_spark(source)


def _sends_offsets(source: SourceTree) -> bool:
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr in ("send_offsets_to_transaction", "send_offsets")
        for call in source.calls()
    )


def _commits(source: SourceTree) -> bool:
    return any(
        isinstance(call.func, ast.Attribute) and call.func.attr in ("commit_transaction", "transaction", "commit")
        for call in source.calls()
    )


def _check_idempotence(source: SourceTree, client: Client) -> Iterator[Finding]:
    is_plain = client.library == "confluent-kafka" and client.role == "producer" and client.is_complete
    named = ("enable.idempotence", "transactional.id", "acks", "retries")
    if is_plain and not any(name in client.expressions for name in named):
        yield finding(
            "idempotence-not-on",
            source.place(client.call),
            "confluent_kafka.Producer without enable.idempotence",
            '"enable.idempotence": True',
        )


def _check_ids(source: SourceTree, made: list[Client]) -> Iterator[Finding]:
    producers = [one for one in made if one.role != "consumer" and "transactional.id" in one.expressions]
    for one in producers:
        node = one.expressions["transactional.id"]
        if part := changes_at_each_start(source, node):
            if _sends_offsets(source):
                rule = "transactional-id-changes-in-group"
            elif _commits(source):
                rule = "transactional-id-changes"
            else:
                continue  # what its transactions hold is in another file
            yield finding(rule, source.place(node), f"transactional.id is made of {part}")
        elif one.settings.transactional_id is not None and (how := is_made_several_times(source, one.call)):
            yield finding(
                "transactional-id-shared",
                source.place(one.call),
                f"transactional.id={one.settings.transactional_id} is always the same, and the producer is {how}",
            )
    for first, second in combinations(producers, 2):
        name = first.settings.transactional_id
        is_same_scope = source.scope_of(first.call) is source.scope_of(second.call)
        if (
            name is not None
            and name == second.settings.transactional_id
            and is_same_scope
            and _both(source, first, second)
        ):
            yield finding(
                "transactional-id-shared",
                source.place(second.call),
                f"transactional.id={name} is also that of the producer in line {first.call.lineno}",
            )


def _both(source: SourceTree, first: Client, second: Client) -> bool:
    """Whether two producers live at once: under two names, and neither in a branch, a loop or a block of its own."""
    statements = [next(source.ancestors(one.call), None) for one in (first, second)]
    if not all(isinstance(one, ast.Assign) for one in statements):
        return False
    assigned = [cast(ast.Assign, one) for one in statements]
    names = {ast.unparse(one.targets[0]) for one in assigned}
    closes = any(
        isinstance(call.func, ast.Attribute) and call.func.attr in ("close", "stop")
        for call in source.calls(source.scope_of(first.call))
    )
    return (
        len(names) == 2 and not closes and all(source.scope_of(one) is next(source.ancestors(one)) for one in assigned)
    )


def _check_loop(source: SourceTree, made: list[Client]) -> Iterator[Finding]:
    """A consume-transform-produce loop: one consumer whose offsets go into the transactions of one producer."""
    consumers = [one for one in made if one.role == "consumer" and one.library != "semel"]
    producers = [one for one in made if one.role == "producer" and "transactional.id" in one.expressions]
    if len(consumers) != 1 or len(producers) != 1:
        return
    consumer, producer = consumers[0], producers[0]
    if not _sends_offsets(source) and not _writes_what_it_reads(source, consumer):
        return
    together = ClientSettings(
        {"transactional.id": "(as in the program)", **producer.settings.values, **consumer.settings.values},
        source.where,
        {**producer.settings.lines, **consumer.settings.lines},
    )
    is_unset = "enable.auto.commit" not in consumer.expressions and consumer.is_complete
    if is_unset:
        yield finding(
            "auto-commit-with-transactions",
            source.place(consumer.call),
            f"{consumer.library} commits automatically unless enable.auto.commit is false",
            '"enable.auto.commit": False' if consumer.library == "confluent-kafka" else "enable_auto_commit=False",
        )
    cares = ("auto-commit-with-transactions", "read-uncommitted-beside-transactions")
    timeouts = ("transaction-timeout-not-below-session-timeout",)
    for one in check_settings(together):
        if one.rule.id in cares + timeouts:
            yield one


_READS: Final = ("poll", "consume", "getone", "getmany")
_SENDS: Final = ("produce", "send", "send_and_wait")


def _writes_what_it_reads(source: SourceTree, consumer: Client) -> bool:
    """Whether a transaction sends what was made of the consumer's records, which are in variables of its function."""
    made = next(source.ancestors(consumer.call), None)
    if not isinstance(made, ast.Assign):
        return False
    owner = ast.unparse(made.targets[0])
    for region in regions(source):
        read = _read_names(source.scope_of(region.opened), owner)
        for call in region.statements:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _SENDS:
                used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
                if used & read:
                    return True
    return False


def _read_names(scope: ast.AST, owner: str) -> set[str]:
    """Variables that hold what a consumer has read."""
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign | ast.For | ast.AsyncFor):
            value = node.value if isinstance(node, ast.Assign) else node.iter
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = value.value if isinstance(value, ast.Await) else value
            is_read = (
                isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _READS
            )
            reader = ast.unparse(value.func.value) if is_read else ast.unparse(value)  # pyright: ignore
            if reader == owner and (is_read or not isinstance(node, ast.Assign)):
                names |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    return names


def _check_databases(source: SourceTree) -> Iterator[Finding]:
    if not uses_database(source):
        return
    for region in regions(source):
        for call in region.statements:
            write = find_write(source, cast(ast.Call, call))
            if write is not None:
                opened = getattr(region.opened, "lineno", 1)
                yield finding(
                    "database-write-in-transaction",
                    source.place(write),
                    f"{_short(write)} runs inside the Kafka transaction that line {opened} opens",
                )


_HTTP: Final = frozenset(
    f"{library}.{verb}" for library in ("requests", "httpx") for verb in ("post", "put", "patch", "delete")
)


def _check_http(source: SourceTree) -> Iterator[Finding]:
    for region in regions(source):
        for call in region.statements:
            if isinstance(call, ast.Call) and source.dotted(call.func) in _HTTP:
                opened = getattr(region.opened, "lineno", 1)
                yield finding(
                    "http-call-in-transaction",
                    source.place(call),
                    f"{_short(call)} runs inside the Kafka transaction that line {opened} opens",
                )


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
