"""How commands print: tables for people, JSON for programs, one sentence and an exit code for what went wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec, TypeVar

import rich.console
import typer
from rich.cells import cell_len
from rich.markup import escape

from semel.cli.progress import working
from semel.errors import ConfigError, SemelError
from semel.inspect.shown import show_text

FAILED: Final = 1
WRONG_USE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

EXIT_CODES: Final = (
    "Exits with status 0, 1 if the cluster refused or did not answer, 2 for wrong use, 130 after Ctrl-C."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs, with whole values.")]
Watch = Annotated[
    float | None,
    typer.Option("--watch", metavar="SECONDS", min=0.1, help="Show it again every so often, until Ctrl-C."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]

_CELL_MAX: Final = 300

_COLOURS: Final = {
    "committed": "green",
    "plain": "green",
    "open": "yellow",
    "aborted": "red",
    "hanging": "red",
    "unknown": "yellow",
}


_P = ParamSpec("_P")
_R = TypeVar("_R")


class Console(rich.console.Console):
    """Rich's own ends the process with status 1 when its reader has gone; here `expected_errors` decides."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def guarded(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """The command within `expected_errors`."""

    @wraps(command)
    def run(*arguments: _P.args, **options: _P.kwargs) -> _R:
        with expected_errors():
            return command(*arguments, **options)

    return run


@contextmanager
def expected_errors() -> Iterator[None]:
    """One sentence on standard error and the right exit code, in place of a stack trace."""
    try:
        try:
            yield
        except typer.Exit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    except ConfigError as error:
        raise _exit(error, WRONG_USE) from error
    except SemelError as error:
        raise _exit(error, FAILED) from error
    except (KeyboardInterrupt, typer.Abort) as error:  # Abort: at a question
        raise typer.Exit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _forget_output()
        raise typer.Exit(BROKEN_PIPE) from error
    except OSError as error:
        if error.strerror is None:  # of a library: not the operating system's
            raise
        if error.filename is None:
            _forget_output()  # such as a full disk behind it
        about = "" if error.filename is None else f" {str(error.filename)!r}"
        typer.echo(f"The operating system refused{about}: {error.strerror}.", err=True)
        raise typer.Exit(FAILED) from error


def _forget_output() -> None:
    """Python would flush once more when it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ensure_writable(path: Path | None) -> None:
    """A file that is written when the work is done: better to learn now that it cannot be."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{str(path)!r} cannot be written: name a file in a folder that is there. Nothing was begun.")


def _exit(error: SemelError, status: int) -> typer.Exit:
    typer.echo(sentence(error), err=True)
    return typer.Exit(status)


def print_failure(what: str, error: BaseException) -> None:
    """What did not come about and why, on standard error, for commands whose status 1 means something else."""
    Console(stderr=True).print(f"[red]{what}:[/red] {escape(sentence(error))}", highlight=False, soft_wrap=True)


def sentence(error: BaseException) -> str:
    """The message on one line, without anything that could act on a terminal."""
    notes = "".join(f" {note}" for note in getattr(error, "__notes__", ()))
    return show_text(" ".join(f"{error}{notes}".split()), longest=2_000)


@dataclass(frozen=True, slots=True)
class Shown:
    """A report, for programs and for people."""

    value: Any
    lines: Sequence[str]


def show(make: Callable[[], Shown], *, as_json: bool = False, watch: float | None = None) -> None:
    """Print a report once, or again and again on a terminal."""
    if watch is None:
        with working("asking the cluster"):
            shown = make()
        _print(shown, as_json)
        return
    if as_json or not sys.stdout.isatty():
        raise ConfigError("--watch is for a terminal: leave it out here, or repeat the command. Nothing was asked.")
    while True:
        try:
            lines = make().lines
        except ConfigError:
            raise
        except SemelError as error:
            lines = [sentence(error)]
        sys.stdout.write("\x1b[H\x1b[2J")
        _print(Shown(None, [f"every {watch:g} s, Ctrl-C ends it", "", *lines]), as_json=False)
        sys.stdout.flush()
        time.sleep(watch)


def _print(shown: Shown, as_json: bool) -> None:
    if as_json:
        print_json(shown.value, indent=2)
        return
    for line in shown.lines:
        typer.echo(line)


def print_json(value: Any, *, indent: int | None = None) -> None:
    """ASCII only, so that no value can do anything to a terminal."""
    sys.stdout.write(json.dumps(value, indent=indent, ensure_ascii=True) + "\n")


def table(titles: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[str] = ()) -> list[str]:
    """Columns side by side, never wrapped. Only what nobody would type is cut."""
    numbers = {titles.index(title) for title in right}
    cells = [[show_text(str(cell), longest=_CELL_MAX) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(titles, *cells, strict=True)]

    def line(row: Sequence[str], paint: Callable[[str, int], str]) -> str:
        padded: list[str] = []
        for place, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - cell_len(cell))
            padded.append(f"{gap}{paint(cell, place)}" if place in numbers else f"{paint(cell, place)}{gap}")
        return "  ".join(padded).rstrip()

    return [line(titles, lambda cell, _: bold(cell)), *(line(row, lambda cell, _: paint(cell)) for row in cells)]


def bold(text: str) -> str:
    return typer.style(text, bold=True) if has_colours() else text


def paint(word: str) -> str:
    """The colour of a state, on a terminal."""
    colour = _COLOURS.get(word)
    return typer.style(word, fg=colour) if colour and has_colours() else word


def has_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if the user says so; without a terminal to ask on, only with --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"{question} There is no terminal to ask on: add --yes. Nothing was changed.")
    try:
        is_wanted = typer.confirm(question, err=True)
    except typer.Abort as error:  # Ctrl-C
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(INTERRUPTED) from error
    if not is_wanted:
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(FAILED)


def parse_place(text: str) -> tuple[str, int | None]:
    """
    >>> parse_place("orders:3"), parse_place("orders")
    (('orders', 3), ('orders', None))
    """
    topic, colon, number = text.rpartition(":")
    if not colon:
        return text, None
    if not number.isascii() or not number.isdigit() or not topic or len(number) > 9:
        raise ConfigError(f"{show_text(text)!r} is no partition: write TOPIC or TOPIC:PARTITION. Nothing was asked.")
    return topic, int(number)
