"""docs/inspect.md shows what the commands print: each is run as it stands there, and its output compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from inspect_scene import Scene, scene
from typer.testing import CliRunner

from semel.cli.main import app

PAGE = Path(__file__).parents[2] / "docs" / "inspect.md"


class Shown(NamedTuple):
    """A command of the page and what the page says that it prints."""

    command: str
    output: list[str]


def shown_on_the_page() -> Iterator[Shown]:
    for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *output = part.splitlines()
            yield Shown(command, output)


def run(command: str) -> list[str]:
    """A command line, perhaps with `printf` before it."""
    before, _, after = command.rpartition(" | ")
    fed = shlex.split(before)[1].encode().decode("unicode_escape").encode() if before else b""
    program, *arguments = shlex.split(after)
    assert program == "semel"
    return CliRunner().invoke(app, arguments, input=fed).output.splitlines()


def shape(lines: list[str]) -> list[str]:
    """Without numbers, times and widths, which differ from run to run."""
    text = "\n".join(" ".join(line.split()) for line in lines)
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", text)
    text = re.sub(r"\b\d+ (ms|s|min|h)( \d+ (s|min))?", "SPAN", text)
    return re.sub(r"\d+", "N", text).splitlines()


def prepare(place: Scene) -> None:
    """What the page says of the broker that its output is from."""
    place.admin.create_topics("orders", partitions=2)
    place.admin.create_topics("semel-ledger")
    with place.producer("order-writer") as producer:
        with producer.transaction():
            producer.send("orders", b"10", key=b"a", partition=0)
            producer.send("orders", b"x", partition=1)
        producer.begin()
        producer.send("orders", b"20", key=b"b", partition=0, headers=[("h", b"\x1b[31m")])
        producer.flush()
        producer.abort()
    place.admin.commit_offsets("billing", {("orders", 0): 1, ("orders", 1): 0})
    place.hang("orders", "late-writer", b"too late", b"\xff\x1b[2J")
    with place.producer() as plain:
        plain.send("orders", b"after", partition=0)


def test_the_commands_of_the_guide_print_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """B8, J1: a hanging transaction is found, explained and ended, and everything beside it is as it is shown."""
    with scene(1) as place:
        prepare(place)
        monkeypatch.setenv("SEMEL_BOOTSTRAP", place.bootstrap)
        shown = list(shown_on_the_page())
        assert len(shown) >= 8
        # The page ends the transaction early, for its reader's sake; all else but the tail shows it open.
        ending = [one for one in shown if "--end" in one.command]
        after = [one for one in shown if one.command.startswith("semel tail")]
        for one in [*(one for one in shown if one not in ending + after), *ending, *after]:
            told, promised = shape(run(one.command)), shape(one.output)
            for line, expected in zip(told, promised, strict=True):
                if expected.endswith("..."):
                    line, expected = line[: len(expected) - 3], expected[:-3]
                assert line == expected, one.command


def test_the_commands_in_the_guides_tables_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are only named."""
    commands = re.findall(r"^\| `(semel [^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 5
    with scene(2) as place:
        prepare(place)
        monkeypatch.setenv("SEMEL_BOOTSTRAP", place.bootstrap)
        for command in commands:
            assert CliRunner().invoke(app, shlex.split(command)[1:]).exit_code == 0, command
