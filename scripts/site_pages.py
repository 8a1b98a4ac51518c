"""Pages of the site that are made from the code, as a hook of MkDocs.

They are commands, Python names, settings, errors and metrics.

So the reference cannot fall behind. Links that lead out of docs/ become plain text, since the site is for people who
have the package and not the repository.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import semel
from semel import errors
from semel.cli.main import app
from semel.client.settings import SETTINGS
from semel.metrics.families import Kind
from semel.metrics.parts import PREFIX, REGISTRY

_OUTSIDE: Final = re.compile(r"\[([^\]]+)\]\((?:\.\./|design\.md)[^)]*\)")
_MARK: Final = re.compile(r"^<!-- example: .*? -->\n", re.MULTILINE)
_MODULES: Final = ("advise", "effects", "logs", "metrics", "traces")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, make in _PAGES.items():
        files.append(File.generated(config, f"reference-{name}.md", content=make()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    return _MARK.sub("", _OUTSIDE.sub(r"\1", markdown))


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands() -> str:
    """Each command's help, as `--help` prints it."""
    parts = ["# Commands\n\nEach command says the same with `--help`.\n"]
    for path, command in _leaves(typer.main.get_command(app)):
        words = " ".join(["semel", *path])
        if path == ("broker",):
            parts.append(f"## {words}\n\nRun the embedded broker; see [broker.md](broker.md) for its options.\n")
            continue
        parts.append(f"## {words}\n\n{_help_text(command.help or '')}\n")
        rows = [_option_row(one) for one in command.params if one.name != "help"]
        if rows:
            parts.append("| option | meaning | default |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _leaves(command: Any, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield before, command
        return
    for name in sorted(command.commands):
        yield from _leaves(command.commands[name], *before, name)


def _help_text(text: str) -> str:
    """Paragraphs after a `\\b` are examples: they keep their lines."""
    parts = re.split(r"\n\s*\n", inspect.cleandoc(text.replace("\b\n", "\n\n\b")))
    shown = [
        "```sh\n" + inspect.cleandoc(part.strip().removeprefix("\b")) + "\n```" if "\b" in part else part
        for part in parts
    ]
    return "\n\n".join(part for part in shown if part.strip())


def _option_row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in getattr(option, "opts", [option.name]))
    default = option.default
    plain = default is not None and not callable(default) and default is not False and default != []
    return f"| {names} | {_cell(getattr(option, 'help', None) or '')} | {f'`{default}`' if plain else ''} |"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# -- Python names ------------------------------------------------------------------------------------------------------


def _api() -> str:
    """Signatures and docstrings of the public names; errors have a page of their own."""
    parts = ["# Python names\n\nAll of them are in `semel`. What is not here may change without notice.\n"]
    for name in sorted(semel.__all__, key=str.lower):
        found = getattr(semel, name)
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            parts.append(_described(f"semel.{name}", found))
    for module in _MODULES:
        found = getattr(semel, module)
        parts.append(f"## semel.{module}\n\n{_prose(found)}\n")
        for name in getattr(found, "__all__", _public(found)):
            value = getattr(found, name, None)
            if inspect.isfunction(value):
                parts.append(_described(f"semel.{module}.{name}", value, level=3))
    return "\n".join(parts)


def _public(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and inspect.isfunction(value) and value.__module__ == module.__name__
    ]


def _described(name: str, found: Any, level: int = 2) -> str:
    parts = [f"{'#' * level} {name}\n"]
    if callable(found):
        parts.append(f"```python\n{name.rpartition('.')[2]}{_signature(found)}\n```\n")
    parts.append(_prose(found) + "\n")
    if isinstance(found, type):
        for member, value in vars(found).items():
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                parts.append(_member(member, value))
    return "\n".join(parts)


def _member(name: str, value: Any) -> str:
    text = _prose(value)
    head = f"`{name}`" if isinstance(value, property) else f"`{name}{_signature(value)}`"
    return f"**{head}**\n\n{text}\n" if text else f"**{head}**\n"


def _signature(found: Any) -> str:
    try:
        return str(inspect.signature(found)).replace("'", "")
    except (TypeError, ValueError):
        return "(...)"


def _prose(found: Any) -> str:
    """A docstring with its examples fenced."""
    text = inspect.getdoc(found) or ""
    blocks = re.split(r"\n\s*\n", text)
    shown = [f"```python\n{_without_directives(one)}\n```" if one.lstrip().startswith(">>>") else one for one in blocks]
    # Indented tables of options stay as they are: Markdown shows them as code.
    return "\n\n".join(shown)


def _without_directives(example: str) -> str:
    return re.sub(r"\s*# doctest: .*", "", example)


# -- tables ------------------------------------------------------------------------------------------------------------


def _settings() -> str:
    rows = [
        f"| `{one.names[0]}` | {', '.join(f'`{name}`' for name in one.names[1:])} | {one.owner} |" for one in SETTINGS
    ]
    return (
        "# Settings\n\nSettings have the names of Kafka's own clients, in a mapping or as keywords with underscores. "
        "What they mean is in Kafka's documentation; defaults that differ are on the pages of the parts. Any other "
        "name is refused with the closest known one.\n\n| setting | also known as | of |\n|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


def _errors() -> str:
    """All exceptions, with what they derive from."""
    kinds = {name: getattr(semel, name) for name in semel.__all__}
    found = {
        name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, errors.SemelError)
    }
    rows = [
        f"| `semel.{name}` | `{kind.__bases__[0].__name__}` | {_cell((inspect.getdoc(kind) or '').split('>>>')[0])} |"
        for name, kind in sorted(found.items())
    ]
    return (
        "# Errors\n\nAll derive from `semel.SemelError`. A message says what happened, what it means for the data, and "
        "what to do.\n\n| error | is a | meaning |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def _metrics() -> str:
    rows = [
        f"| `{PREFIX}{one.name}{'_total' if one.kind is Kind.COUNTER else ''}` | {one.kind.name.lower()} | "
        f"{', '.join(one.labels)} | {one.help_text} |"
        for one in REGISTRY.families()
    ]
    return (
        "# Metrics\n\nHow to get them is in [watching.md](watching.md). The embedded broker's are on the page that "
        "`semel broker --metrics-port` serves.\n\n| metric | kind | labels | shows |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


_PAGES: Final[dict[str, Callable[[], str]]] = {
    "commands": _commands,
    "api": _api,
    "settings": _settings,
    "errors": _errors,
    "metrics": _metrics,
}
