"""Keeps the worker processes of a run alive: who was killed or fenced begins another life, until it is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from semel.errors import InvalidState
from semel.verify.history import Manifest
from semel.verify.worker import Exit, ask_to_stop, spawn_worker
from semel.verify.workloads.workload import Plan, WorkerPlan

_STOP_S: Final = 120.0
_LAST_LINES: Final = 15


@dataclass(eq=False)
class _Lives:
    """One worker over all of its lives."""

    plan: WorkerPlan
    process: subprocess.Popen[bytes] | None = None
    number: int = -1
    count: int = 0
    is_stopping: bool = False
    is_done: bool = False


class Supervisor:
    """Has the face of `semel.verify.faults.driver.Workers`; the driver's threads call it too."""

    def __init__(
        self,
        plan: Plan,
        manifest: Manifest,
        *,
        folder: Path,
        bootstrap_of: Callable[[WorkerPlan], str],
        seed: int,
        settings: Mapping[str, Any],
    ) -> None:
        self._plan = plan
        self._manifest = manifest
        self._folder = folder
        self._bootstrap_of = bootstrap_of
        self._seed = seed
        self._settings = settings
        self._lock = threading.Lock()
        self._workers = {worker.name: _Lives(worker) for worker in plan.workers}
        self.fenced = 0

    @property
    def lives(self) -> int:
        """How many processes there were in all."""
        return sum(worker.count for worker in self._workers.values())

    def start_all(self, *, but: str | None = None) -> None:
        """All that do not run yet, without those of one kind."""
        for name, worker in self._workers.items():
            if worker.plan.role.kind != but:
                self.start(name)

    # What the driver of the faults calls.

    def process_id(self, name: str) -> int | None:
        with self._lock:
            process = self._workers[name].process
            return process.pid if process is not None and process.poll() is None else None

    def send_signal(self, process_id: int, number: signal.Signals) -> None:
        os.kill(process_id, number)

    def start(self, name: str) -> None:
        """Begin the next life of a worker, unless one is running or it is to have no more."""
        with self._lock:
            worker = self._workers[name]
            if worker.process is not None and worker.process.poll() is None:
                return
            self._bury(worker)
            if not worker.is_stopping and not worker.is_done:
                self._begin_life(worker)

    # What the run calls.

    def tend(self) -> None:
        """See who has ended, and begin their next lives. Raises InvalidState if one failed by an error of its own."""
        for name in self._workers:
            self.start(name)

    def is_done(self, kind: str) -> bool:
        """Whether all workers of this kind have done what they were to do."""
        return all(worker.is_done for worker in self._workers.values() if worker.plan.role.kind == kind)

    def stop(self, kinds: Iterable[str]) -> None:
        """Let the workers of these kinds end in order, and wait; one that does not is killed, as by a fault."""
        wanted = set(kinds)
        with self._lock:
            chosen = [worker for worker in self._workers.values() if worker.plan.role.kind in wanted]
            for worker in chosen:
                worker.is_stopping = True
                if worker.process is not None:
                    ask_to_stop(worker.process)
        for worker in chosen:
            if worker.process is not None:
                try:
                    worker.process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    worker.process.kill()
                    worker.process.wait()
        with self._lock:
            for worker in chosen:
                self._bury(worker)

    def kill_all(self) -> None:
        """Leave nobody behind, whatever happened."""
        with self._lock:
            for worker in self._workers.values():
                worker.is_stopping = True
                if worker.process is not None:
                    worker.process.kill()
                    worker.process.wait()
                    _close_pipes(worker.process)
                    worker.process = None

    def _begin_life(self, worker: _Lives) -> None:
        number = len(self._manifest.processes)
        self._manifest.processes.append(self._plan.process(worker.plan, number=number, life=worker.count))
        spec = self._plan.spec(
            worker.plan,
            folder=self._folder,
            number=number,
            bootstrap=self._bootstrap_of(worker.plan),
            seed=self._seed,
            life=worker.count,
            settings=self._settings,
        )
        worker.process, worker.number = spawn_worker(spec), number
        worker.count += 1

    def _bury(self, worker: _Lives) -> None:
        process, worker.process = worker.process, None
        if process is None:
            return
        _close_pipes(process)
        code = process.returncode
        if code in (Exit.FAILED, Exit.MISCONFIGURED):
            raise InvalidState(f"The worker {worker.plan.name} failed, so the run ends: {self._last_words(worker)}")
        self.fenced += code == Exit.FENCED
        worker.is_done = code == Exit.DONE

    def _last_words(self, worker: _Lives) -> str:
        log = self._folder / f"{worker.number}.log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-_LAST_LINES:]) or "it said nothing."


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None and not pipe.closed:
            pipe.close()
