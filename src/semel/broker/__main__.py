"""`python -m semel.broker`: the broker as a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def leave_out_hypothesis() -> None:
    """Let hypothesis not be installed in this process; to be called before kio is imported.

    kio makes its types known to hypothesis wherever that is installed, which in a developer's environment costs each
    start of a broker 0.3 s and 15 MB.
    """
    sys.modules.setdefault("hypothesis", None)  # type: ignore[arg-type]


def main(argv: Sequence[str]) -> int:
    """Run a broker until it is told to stop; returns the exit code of the process."""
    from semel.broker.arguments import parse_arguments
    from semel.errors import SemelError

    try:
        arguments = parse_arguments(argv)
    except SemelError as error:
        print(f"semel broker cannot start: {error}", file=sys.stderr)
        return 1
    from semel.broker.run import run

    return run(
        arguments.options,
        metrics_port=arguments.metrics_port,
        ui_port=arguments.ui_port,
        log_level=arguments.log_level,
    )


if __name__ == "__main__":
    leave_out_hypothesis()
    sys.exit(main(sys.argv[1:]))
