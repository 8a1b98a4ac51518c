"""A broker process under load that clients make on purpose: its memory stays in its budget, and nobody else waits.

How long the loop was held is judged by the processor time of its turns: 50 ms at most. How long a bystander waits is
judged by the clock on the wall, for each answer, without the time in which the machine let others run (see
`load_harness`): 100 ms at most.
"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from load_attacks import PASSWORD, USER
from load_harness import Report, attack

from semel.broker.held_memory import HELD_BYTES_MAX

BUDGET_BYTES = 64 << 20
"""Small, so that an attack that it does not bound is over it in seconds."""

QUICK = [
    "regex_list_transactions",
    "many_small_fetches",
    "unread_answers",
    "describe_configs",
    "tiny_frames",
]
THOROUGH = [
    "regex_group",
    "half_frames",
    "long_names",
    "long_sessions",
    "pending_members",
    "large_members",
    "made_up_producers",
    "scram_users",
]
LONG = [
    "transactional_ids",
    "new_topics",
    "wide_requests",
    "many_partitions",
    "wide_transactions",
    "late_transactions",
    "late_members",
    "compacted_batches",
    "recompressed_batches",
    "record_bombs",
    "wide_windows",
    "large_messages",
    "metrics_of_many",
    "repeated_partitions",
]


def judge(report: Report, budget_bytes: int) -> None:
    assert report.grown_bytes < 1.2 * budget_bytes, report
    assert report.turns_over_50_ms == 0, report
    assert report.slowest.broker_s < 0.1, report
    assert report.median_s < 0.1, report


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.large) for name in THOROUGH)])
def test_an_attack_stays_within_the_budget_and_holds_nobody_up(name: str) -> None:
    """Expressions, waiting and unread answers, frames, long names and ids, sessions, members, producers: one by one."""
    judge(attack(name, config={"semel.client.memory.max.bytes": BUDGET_BYTES}), BUDGET_BYTES)


@pytest.mark.large
@pytest.mark.parametrize("name", LONG)
def test_long_work_for_one_client_holds_nobody_up(name: str) -> None:
    """Thousands of topics, partitions, entries and ids, timeouts all at once, and batches of 700,000 records."""
    judge(attack(name), HELD_BYTES_MAX)


@pytest.mark.large
def test_thousands_of_rules_are_bounded_and_hold_nobody_up() -> None:
    """A hundred thousand ACLs; those that are taken are looked through for thousands of filters."""
    config = {"authorizer.class.name": "acls", "super.users": "User:ANONYMOUS"}
    judge(attack("many_rules", config=config), HELD_BYTES_MAX)


@pytest.mark.parametrize("budget_bytes", [BUDGET_BYTES, HELD_BYTES_MAX])
def test_a_kilobyte_with_millions_of_headers_holds_nobody_up(budget_bytes: int) -> None:
    """Looked for by time, compacted and recompressed. Within the smaller budget a search by time is refused."""
    report = attack("header_bombs", config={"semel.client.memory.max.bytes": budget_bytes})
    judge(report, budget_bytes)
    assert report.metrics["semel_broker_refused_connections_total"] == 0, report


def test_fetches_that_wait_hold_no_records() -> None:
    """Twenty readers that want more than there is held 50 MB each, and a gigabyte together."""
    judge(attack("waiting_fetches"), HELD_BYTES_MAX)


def attack_logins(name: str, folder: Path) -> Report:
    users = folder / "users"
    users.touch(mode=0o600)
    users.write_text(f"{USER}={PASSWORD}\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listeners = ["--listener", "PLAINTEXT://127.0.0.1:0", "--listener", f"SASL_PLAINTEXT://127.0.0.1:{port}"]
    budget = {"semel.client.memory.max.bytes": BUDGET_BYTES}
    return attack(name, config=budget, arguments=[*listeners, "--users", str(users)], target=f"127.0.0.1:{port}")


def test_connections_that_have_not_logged_in_share_a_small_part(tmp_path: Path) -> None:
    """1,500 of them with half a megabyte each held 800 MB."""
    judge(attack_logins("before_login", tmp_path), BUDGET_BYTES // 2)


def test_hundreds_of_logins_at_the_same_moment_hold_nobody_up(tmp_path: Path) -> None:
    """A password takes milliseconds to compare. Four hundred of them kept everybody else waiting for 650 ms."""
    judge(attack_logins("logins_at_once", tmp_path), BUDGET_BYTES)
