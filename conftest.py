"""One seed for all random tests of a run: a new one each time, printed at the top, and SEMEL_SEED repeats it."""

from __future__ import annotations

import os
import random
import signal

import pytest
from _pytest.doctest import DoctestItem
from hypothesis import settings

import semel

# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("semel", deadline=None)
settings.load_profile("semel")


def pytest_configure() -> None:
    # What a shell has started in its background ignores Ctrl-C, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("SEMEL_SEED", str(random.randrange(1_000_000)))


def pytest_report_header() -> str:
    return f"random tests: SEMEL_SEED={os.environ['SEMEL_SEED']}"


@pytest.fixture(scope="session")
def example_bootstrap(semel_broker: semel.Broker) -> str:
    with semel.Admin({"bootstrap.servers": semel_broker.bootstrap}) as admin:
        admin.create_topics("orders", "greetings")
    return semel_broker.bootstrap


@pytest.fixture(autouse=True)
def examples(request: pytest.FixtureRequest, doctest_namespace: dict[str, object]) -> None:
    """Examples in docstrings run on a broker with two topics, whose address they call `bootstrap`."""
    if isinstance(request.node, DoctestItem):
        doctest_namespace["bootstrap"] = request.getfixturevalue("example_bootstrap")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Randomness of one test's own, repeated by SEMEL_SEED."""
    seed = f"{os.environ['SEMEL_SEED']}-{request.node.name}"
    print(f"seed {seed} (repeat with SEMEL_SEED={os.environ['SEMEL_SEED']})")
    return random.Random(seed)
