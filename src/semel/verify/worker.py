"""One life of one client of a workload, as a process: `python -m semel.verify.worker <file of JSON>`.

It writes its rows to the run's folder until the line `stop`, the end of its standard input or SIGTERM ends it in order;
SIGKILL at any moment is what it is made for. It ends by itself when its parent does. A broker that goes away and comes
back does not end it; being fenced does. What an exit code means is in `Exit`.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from enum import IntEnum
from pathlib import Path
from typing import Final

from semel.errors import ConfigError, Fenced
from semel.processes import spawn
from semel.verify.clients.libraries import open_clients
from semel.verify.workloads.life import HOPELESS, Life, Stopped, WorkerSpec
from semel.verify.workloads.registry import make_workload

__all__ = ["Exit", "WorkerSpec", "command", "spawn_worker", "stop_worker"]

_ORPHAN_S: Final = 30.0


class Exit(IntEnum):
    """How a life ended."""

    DONE = 0
    """It was told to stop, or has done all it was to do."""
    FAILED = 1
    """By an error of its own, which is in its log: nothing that a broker may do should lead to it."""
    MISCONFIGURED = 2
    """What it was told makes no sense, its library is not installed, or the broker does not let it in."""
    FENCED = 3
    """Another process has its transactional id now, or its transaction outlived its time: start its next life."""


def command(spec: WorkerSpec) -> list[str]:
    """How to start the process, once `spec.save()` was called; it must have a pipe as its standard input."""
    # -P: a file of the user's called like a module of the standard library, in whichever folder, is not for us.
    return [sys.executable, "-P", "-m", "semel.verify.worker", str(spec.path)]


def spawn_worker(spec: WorkerSpec) -> subprocess.Popen[bytes]:
    """Start it; it cannot outlive this process. What it has to say goes to `<number>.log` in the run's folder."""
    folder = Path(spec.folder)
    spec.save()
    return spawn(command(spec), folder=folder, output=folder / f"{spec.number}.log", pipes=True)


def stop_worker(process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> int:
    """Ask it to end in order, and wait; one that does not is killed. Returns its exit code."""
    ask_to_stop(process)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()


def ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    """Without waiting, for many at once."""
    if process.stdin is None or process.stdin.closed:
        return
    try:
        process.stdin.write(b"stop\n")
        process.stdin.close()
    except BrokenPipeError:  # it has ended already
        process.stdin.close()


def main(arguments: list[str]) -> int:
    logging.getLogger().setLevel(logging.CRITICAL)  # a broker that is away is no news here
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    threading.Thread(target=_listen, args=(stopping,), name="listener", daemon=True).start()
    try:
        spec = WorkerSpec.load(Path(arguments[0]))
        life = Life(spec, stopping, open_clients)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Exit.MISCONFIGURED
    try:
        make_workload(spec.workload, spec.prefix, life.options).live(life)
    except Stopped:
        return Exit.DONE
    except Fenced as fenced:
        print(fenced, file=sys.stderr)
        return Exit.FENCED
    except HOPELESS as error:
        print(error, file=sys.stderr)
        return Exit.MISCONFIGURED
    except Exception:
        traceback.print_exc()
        return Exit.FAILED
    finally:
        life.history.close()
    return Exit.DONE


def _listen(stopping: threading.Event) -> None:
    said_so = any(line.strip() == b"stop" for line in sys.stdin.buffer)
    stopping.set()
    if not said_so:  # the parent is gone, and nobody will kill this process if it cannot end in order
        threading.Event().wait(_ORPHAN_S)
        os._exit(Exit.FAILED)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # The history is in the kernel's hands. What the libraries do at exit may wait for a broker that is gone.
    os._exit(code)
