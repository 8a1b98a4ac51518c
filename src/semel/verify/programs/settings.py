"""What a user asks for with `semel verify --command`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.errors import ConfigError
from semel.verify.workloads.options import Options

DEFAULT_OPTIONS: Final[Mapping[str, Any]] = {"rate": 200.0, "workers": 1, "patience_s": 120.0}
OPTIONS: Final = frozenset(
    {
        "partitions",
        "replication",
        "workers",
        "rate",
        "keys",
        "record_bytes",
        "patience_s",
        "transaction_timeout_ms",
        "session_timeout_ms",
    }
)
"""Those that mean something to a command. `workers` is how many instances of it run at a time."""


@dataclass(frozen=True)
class ProgramSettings:
    """What the user asks for."""

    folder: Path
    command: str
    input: str
    outputs: tuple[str, ...]
    rule: str = "copy"
    generator: str | None = None
    target: str = "embedded"
    client: str = "semel"
    """The library of the reader that watches the outputs."""
    faults: str | None = None
    seed: int = 0
    time_s: float = 60.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Changes to `DEFAULT_OPTIONS`."""
    transaction_version: int | None = None
    replay: Path | None = None

    def again(self) -> str:
        """What runs it again."""
        words = ["semel", "verify", "--command", self.command, "--input", self.input]
        for topic in self.outputs:
            words += ["--output", topic]
        words += ["--rule", self.rule, *(["--generator", self.generator] if self.generator else [])]
        words += ["--target", self.target, "--client", self.client]
        words += ["--seed", str(self.seed), "--time", f"{self.time_s:g}s"]
        words += ["--faults", self.faults] if self.faults is not None else []
        if self.transaction_version is not None:
            words += ["--transaction-version", str(self.transaction_version)]
        words += ["--replay", str(self.replay)] if self.replay is not None else []
        for name, value in self.options.items():
            words += ["--option", f"{name}={value}"]
        return shlex.join(words)

    def all_options(self) -> Options:
        if unknown := sorted(set(self.options) - OPTIONS):
            raise ConfigError(
                f"{', '.join(unknown)} means nothing to a command: its options are {', '.join(sorted(OPTIONS))}."
            )
        options = Options.from_mapping({**DEFAULT_OPTIONS, **self.options})
        if options.rate <= 0:
            raise ConfigError("rate=0 is no rate for a command: write how many records a second its input has.")
        return options

    def check_topics(self) -> None:
        """Raise ConfigError unless there are an input and outputs, all different."""
        topics = [self.input, *self.outputs]
        if not self.input or not self.outputs:
            raise ConfigError("A command needs its topics: write --input TOPIC and --output TOPIC.")
        if len(set(topics)) < len(topics):
            raise ConfigError(f"Input and outputs must be different topics: {', '.join(topics)}.")
