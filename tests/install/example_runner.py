"""Runs examples one after the other in this Python, which has an installed Semel and knows nothing of the repository.

Reads a list of examples from stdin as JSON. Addresses and folders that an example makes up are replaced by real ones.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import semel

_DEADLINE_S = 90.0


def stop_when(is_done: Callable[[], bool]) -> None:
    """Press Ctrl-C for an example that runs for ever, when it has done its work."""

    def watch() -> None:
        until = time.monotonic() + _DEADLINE_S
        while time.monotonic() < until and not is_done():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    namespace: dict[str, Any] = {}
    with ExitStack() as stack:
        for example in json.load(sys.stdin):
            where, code, setup = example["name"], example["code"], example["setup"]
            if not example["continues"]:
                namespace = {"__name__": "__main__"}
            if setup is not None:
                broker = stack.enter_context(semel.Broker())
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                os.chdir(folder)
                code = code.replace("127.0.0.1:9092", broker.bootstrap).replace('"/data/', f'"{folder}/')
                namespace |= {"bootstrap": broker.bootstrap, "folder": folder, "stop_when": stop_when}
                exec(compile(setup, f"setup of {where}", "exec"), namespace)
            try:
                exec(compile(code, where, "exec"), namespace)
            except KeyboardInterrupt:
                if "stop_when" not in namespace:
                    raise
            if "check" in namespace:
                namespace.pop("check")()
            print("ran", where, flush=True)


if __name__ == "__main__":
    main()
