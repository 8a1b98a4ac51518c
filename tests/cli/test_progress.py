"""Long commands say on a terminal what they work at, on standard error; without a terminal they say nothing."""

from __future__ import annotations

import io
import os
import pty
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from preloaded import Preloaded

from semel.cli.progress import ProgressView, progress_view, tell, working


@contextmanager
def terminal() -> Iterator[tuple[int, str]]:
    """Where what is written to it can be read, and its path."""
    leader, follower = pty.openpty()
    try:
        yield leader, os.ttyname(follower)
    finally:
        os.close(leader)
        os.close(follower)


def read_until(leader: int, words: bytes) -> bytes:
    shown = b""
    while words not in shown:
        assert select.select([leader], [], [], 120)[0], shown
        shown += os.read(leader, 65_536)
    return shown


def test_a_command_that_waits_says_so_on_a_terminal_and_leaves_standard_output_alone(tmp_path: Path) -> None:
    """The output goes into a file, so that a program can read it; the line is gone in the end."""
    with (
        Preloaded(tmp_path) as commands,
        socket.create_server(("127.0.0.1", 0)) as silent,
        terminal() as (leader, path),
    ):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        commands.start(["inspect", "groups", "--json", "--bootstrap", address], stderr=path)
        shown = read_until(leader, b"asking the cluster")
        commands.interrupt()
        ended = commands.end()
    assert (ended.status, ended.stdout) == (130, "")
    assert b"0:00:0" in shown


def test_without_a_terminal_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a file or a log, lines that move are rubbish."""
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    with progress_view() as shown, working("much"):
        shown.update("half")
        tell("the other half")
        shown.aside(lambda: None)
    assert written.getvalue() == ""


def test_what_stays_is_printed_above_what_moves() -> None:
    """On a terminal both: the view is taken away meanwhile, and comes again."""
    steps: list[str] = []

    class Recorded:
        def stop(self) -> None:
            steps.append("stop")

        def start(self) -> None:
            steps.append("start")

    ProgressView(Recorded()).aside(lambda: steps.append("said"))  # type: ignore[arg-type]
    assert steps == ["stop", "said", "start"]


def test_the_words_of_the_innermost_work_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tell` needs nothing from the caller, and does nothing after the block."""
    with terminal() as (leader, path), open(path, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with working("starting"):
            tell("measuring records")
            shown = read_until(leader, b"measuring records")
        tell("after the block")
    assert b"starting" not in shown
