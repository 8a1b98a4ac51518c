"""Carries out a plan of faults on a running target, and records what was really done and when.

Each fault runs in a thread of its own and takes back what it did, also when the run is stopped in the middle of it.
What cannot be taken back, such as a broker that does not start again, is the driver's `failure`: a finding.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Protocol, Self

from semel.errors import ConfigError, InvalidState, SemelError
from semel.testing.proxy import Cut, Direction
from semel.verify.faults.hijack import NoOwner, hijack
from semel.verify.faults.kinds import PROXY_KINDS, FaultKind
from semel.verify.faults.plan import BROKERS_LANE, Fault, FaultPlan
from semel.verify.faults.proxy import Crash, FaultProxy, Hold, HoldUntil, Match, Outlive, Repeat, Silence, Treatment
from semel.verify.faults.targets import Target
from semel.wire import Api

_TRAP_PATIENCE_MS: Final = 10_000
"""How long a fault waits for its request to come by."""
_NEXT_WRITE: Final = (Match(Api.END_TXN, Direction.RESPONSE), Match(Api.PRODUCE, Direction.RESPONSE))
"""What a late EndTxn waits for: the client's second try has succeeded, and the next transaction has a record."""
_POLL_S: Final = 0.05
_JOIN_S: Final = 120.0
_DEATH_S: Final = 2.0


class Workers(Protocol):
    """The client processes of a run, as their supervisor knows them by name."""

    def process_id(self, name: str) -> int | None:
        """Of its present life; None while none is running."""
        ...

    def send_signal(self, process_id: int, number: signal.Signals) -> None:
        """To a life and everything it has started; ProcessLookupError if it is gone."""
        ...

    def start(self, name: str) -> None:
        """Begin the next life of a worker that was killed. One that the supervisor has started by itself is fine."""
        ...


Outcome = Literal["done", "missed", "failed"]


@dataclass(frozen=True, slots=True)
class Record:
    """A fault as it was carried out; times are of the machine's monotonic clock, as in a history."""

    fault: Fault
    start_ns: int
    """When the run began: `begin_ns - start_ns` is what the plan counts in."""
    begin_ns: int
    end_ns: int
    outcome: Outcome
    note: str

    def to_json(self) -> str:
        fields: dict[str, Any] = {
            **self.fault.to_json(),
            "start_ns": self.start_ns,
            "begin_ns": self.begin_ns,
            "end_ns": self.end_ns,
            "outcome": self.outcome,
            "note": self.note,
        }
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, line: str) -> Self:
        fields = json.loads(line)
        times = (fields["start_ns"], fields["begin_ns"], fields["end_ns"])
        return cls(Fault.from_json(fields), *times, fields["outcome"], fields["note"])


class _Missed(Exception):
    """There was nothing to do it to."""


class Driver:
    """Carries out `plan`; a context manager, or `start()` and `stop()`.

    `record_path` gets a line for each fault that is over. Whoever waits for the end of the plan calls `wait`. `prefix`
    is what the run's client and transactional ids have before the names in the plan, which is the same for every run.
    """

    def __init__(
        self,
        plan: FaultPlan,
        target: Target,
        *,
        record_path: Path,
        proxy: FaultProxy | None = None,
        workers: Workers | None = None,
        prefix: str = "",
    ) -> None:
        self._plan = plan
        self._prefix = prefix
        self._target = target
        self._proxy = proxy
        self._workers = workers
        self._record_path = record_path
        self.records: list[Record] = []
        self.failure: Exception | None = None
        """Why the run cannot go on, if it cannot."""
        self._start_ns = 0
        self._active = 0
        self._last_ns: int | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._lanes = {lane: threading.Lock() for fault in plan.faults for lane in fault.lanes}
        self._timeline: threading.Thread | None = None
        self._check()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to count time."""
        if self._timeline is not None:
            raise InvalidState("The faults of this driver have begun already: make another for another run.")
        self._start_ns = time.monotonic_ns()
        self._timeline = threading.Thread(target=self._run, name="semel-faults", daemon=True)
        self._timeline.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every fault is over; False if that takes longer."""
        if self._timeline is None:
            raise InvalidState("The faults have not begun: call start() first.")
        self._timeline.join(timeout_s)
        return not self._timeline.is_alive()

    def stop(self) -> None:
        """Begin no more faults, end those that last, and return when everything is as it was."""
        self._stopping.set()
        if self._proxy is not None:
            self._proxy.release_all()
        if self._timeline is not None:
            self._timeline.join(_JOIN_S)

    def is_near(self, within_s: float) -> bool:
        """Whether a fault is being carried out, or was within so many seconds."""
        with self._lock:
            return self._active > 0 or (
                self._last_ns is not None and time.monotonic_ns() - self._last_ns < within_s * 1e9
            )

    def raise_failure(self) -> None:
        """Raise what has gone wrong for good."""
        if self.failure is not None:
            raise self.failure

    def _check(self) -> None:
        """Everything that cannot be done is said before anything is."""
        for fault in self._plan.faults:
            if reason := self._why_not(fault):
                raise ConfigError(
                    f"The fault {fault.kind} of the plan cannot be had on {self._target.name}: {reason}. "
                    "Nothing was started; leave it out."
                )

    def _why_not(self, fault: Fault) -> str | None:
        if fault.kind in self._target.impossible:
            return self._target.impossible[fault.kind]
        if fault.kind in PROXY_KINDS and self._proxy is None:
            return "there is no proxy between the clients and the brokers"
        if (fault.details.get("workers") or fault.details.get("victim")) and self._workers is None:
            return "there are no worker processes"
        if "broker" in fault.details:
            if FaultKind.PAUSE in self._target.impossible:
                return self._target.impossible[FaultKind.PAUSE]
            if _broker_of(fault) >= self._target.broker_count:
                return f"it is meant for broker {_broker_of(fault)}, and there are {self._target.broker_count}"
        return None

    # The course of things.

    def _run(self) -> None:
        threads: list[threading.Thread] = []
        for fault in self._plan.faults:
            due_s = self._start_ns / 1e9 + fault.at_ms / 1000 - time.monotonic()
            if self._stopping.wait(max(due_s, 0)):
                break
            thread = threading.Thread(target=self._carry_out, args=(fault,), name=f"semel-{fault.kind}", daemon=True)
            threads.append(thread)
            thread.start()
            threads = [one for one in threads if one.is_alive()]
        for thread in threads:
            thread.join()

    def _carry_out(self, fault: Fault) -> None:
        lanes = sorted(fault.lanes)  # in one order, or two faults could wait for each other
        for lane in lanes:
            self._lanes[lane].acquire()
        begin_ns = time.monotonic_ns()
        end_ns = None
        with self._lock:
            self._active += 1
        try:
            if self._stopping.is_set() or begin_ns - self._start_ns > self._plan.duration_ms * 1_000_000:
                raise _Missed("the run was over")
            outcome: Outcome = "done"
            if fault.kind in PROXY_KINDS:
                note, begin_ns, end_ns = self._trap(fault)
            else:
                if BROKERS_LANE in lanes:
                    self._target.check_broker(_broker_of(fault))
                note = self._ways()[fault.kind](fault) or ""
        except (_Missed, NoOwner) as missed:
            outcome, note = "missed", str(missed)
        except (SemelError, OSError) as failure:
            outcome, note = "failed", str(failure)
            self.failure = self.failure or failure
        finally:
            for lane in lanes:
                self._lanes[lane].release()
        self._write(Record(fault, self._start_ns, begin_ns, end_ns or time.monotonic_ns(), outcome, note))

    def _write(self, record: Record) -> None:
        with self._lock:
            self._active -= 1
            if record.outcome != "missed":
                self._last_ns = record.end_ns
            self.records.append(record)
            with self._record_path.open("a") as file:
                file.write(record.to_json() + "\n")

    def _last(self, fault: Fault) -> None:
        self._stopping.wait(fault.for_ms / 1000)

    # What is done to processes and ids.

    def _ways(self) -> Mapping[FaultKind, Callable[[Fault], str | None]]:
        return {
            FaultKind.KILL: self._kill,
            FaultKind.RESTART: self._restart,
            FaultKind.PAUSE: self._pause,
            FaultKind.DISK: self._fill_disk,
            FaultKind.CLOCK: self._shift_clock,
            FaultKind.STORM: lambda fault: (
                self._stop_workers(fault) if "workers" in fault.details else self._pause(fault)
            ),
            FaultKind.WORKER_KILL: self._kill_worker,
            FaultKind.WORKER_PAUSE: self._stop_workers,
            FaultKind.ZOMBIE: self._stop_workers,
            FaultKind.HIJACK: self._hijack,
        }

    def _kill(self, fault: Fault) -> None:
        number = _broker_of(fault)
        self._target.kill_broker(number)
        self._last(fault)
        self._target.start_broker(number)

    def _restart(self, fault: Fault) -> None:
        number = _broker_of(fault)
        self._target.stop_broker(number)
        self._last(fault)
        self._target.start_broker(number)

    def _pause(self, fault: Fault) -> None:
        number = _broker_of(fault)
        self._target.pause_broker(number)
        try:
            self._last(fault)
        finally:
            self._target.resume_broker(number)

    def _fill_disk(self, fault: Fault) -> None:
        number = _broker_of(fault)
        self._target.fill_disk(number, int(fault.details["free_bytes"] or 0))
        try:
            self._last(fault)
        finally:
            self._target.free_disk(number)

    def _shift_clock(self, fault: Fault) -> None:
        self._target.shift_clock(_broker_of(fault), int(fault.details["jump_ms"] or 0))

    def _kill_worker(self, fault: Fault) -> str:
        name = str(fault.details["workers"])
        process_id = self._signal(name, signal.SIGKILL)
        self._last(fault)
        self._known_workers.start(name)
        return f"process {process_id}"

    def _stop_workers(self, fault: Fault) -> str:
        stopped: dict[str, int] = {}
        try:
            for name in str(fault.details["workers"]).split(","):
                if self._known_workers.process_id(name) is not None:
                    stopped[name] = self._signal(name, signal.SIGSTOP)
            if not stopped:
                raise _Missed("no worker was running")
            self._last(fault)
        finally:
            for name, process_id in stopped.items():
                if self._known_workers.process_id(name) == process_id:  # else it has died, and its number is not ours
                    self._signal(name, signal.SIGCONT)
        return f"processes {', '.join(map(str, stopped.values()))}"

    def _signal(self, name: str, number: signal.Signals) -> int:
        process_id = self._known_workers.process_id(name)
        if process_id is None:
            raise _Missed(f"the worker {name} was not running")
        try:
            self._known_workers.send_signal(process_id, number)
        except ProcessLookupError:
            raise _Missed(f"the worker {name} was gone") from None
        return process_id

    @property
    def _known_workers(self) -> Workers:
        if self._workers is None:
            raise InvalidState("There are no worker processes in this run.")
        return self._workers

    def _hijack(self, fault: Fault) -> str:
        transactional_id = f"{self._prefix}{fault.details['transactional_id']}"
        keeps_epoch = bool(fault.details["keeps_epoch"])
        try:
            return hijack(
                self._target.bootstrap, transactional_id, keeps_epoch=keeps_epoch, wait=lambda: self._last(fault)
            )
        except SemelError as error:  # the broker may be away just now, by another fault
            raise _Missed(str(error)) from error

    # What is done to requests and answers.

    def _trap(self, fault: Fault) -> tuple[str, int, int]:
        """In words what it met, and from when to when."""
        if self._proxy is None:
            raise InvalidState("There is no proxy in this run.")
        trap = self._proxy.set_trap(_match(fault, self._prefix), self._treatment(fault))
        if not self._polled(trap.wait_struck, _TRAP_PATIENCE_MS) and self._proxy.remove_trap(trap):
            raise _Missed(f"no such {fault.details.get('direction', 'request')} came by")
        self._polled(trap.wait_over, fault.for_ms + _TRAP_PATIENCE_MS)
        trap.release()
        if not trap.wait_over(_JOIN_S) or trap.began_ns is None or trap.ended_ns is None or trap.passage is None:
            raise InvalidState(f"The proxy did not finish the fault {fault.number} ({fault.kind}).")
        met = trap.passage
        note = f"{Api(met.api_key).name} v{met.api_version} of client {met.client_id!r}, connection {met.connection}"
        if fault.kind is FaultKind.CRASH:
            self._last(fault)
            self._known_workers.start(str(fault.details["victim"]))
        return note, trap.began_ns, trap.ended_ns

    def _treatment(self, fault: Fault) -> Treatment:
        match fault.kind:
            case FaultKind.CRASH:
                return Crash(partial(self._kill_at_once, str(fault.details["victim"])), Cut(fault.details["when"]))
            case FaultKind.CUT:
                return Cut(fault.details["when"])
            case FaultKind.DELAY:
                return Hold(fault.for_ms)
            case FaultKind.SILENCE:
                return Silence()
            case FaultKind.REPEAT:
                return Repeat(fault.for_ms)
            case FaultKind.LATE:
                return Outlive(_NEXT_WRITE, fault.for_ms)
            case _:
                return HoldUntil(Match(Api[str(fault.details["overtaker"])], Direction.RESPONSE), fault.for_ms)

    def _kill_at_once(self, name: str) -> None:
        """Return when the process is gone: what it has sent is then its last word."""
        process_id = self._known_workers.process_id(name)
        if process_id is not None:  # else another fault was quicker, and this request is what is left of it
            with suppress(ProcessLookupError):
                self._known_workers.send_signal(process_id, signal.SIGKILL)
            deadline = time.monotonic() + _DEATH_S
            while self._known_workers.process_id(name) == process_id and time.monotonic() < deadline:
                time.sleep(_DEATH_S / 1_000)

    def _polled(self, wait: Callable[[float], bool], timeout_ms: float) -> bool:
        """Wait, unless the run is stopped."""
        deadline = time.monotonic() + timeout_ms / 1000
        while not (is_so := wait(_POLL_S)) and time.monotonic() < deadline and not self._stopping.is_set():
            continue
        return is_so


def _broker_of(fault: Fault) -> int:
    return int(fault.details["broker"] or 0)


def _match(fault: Fault, prefix: str) -> Match:
    client_id = fault.details.get("client_id")
    return Match(
        Api[str(fault.details["api"])],
        Direction(fault.details.get("direction", "request")),
        None if client_id is None else f"{prefix}{client_id}",
        int(fault.details.get("nth") or 1),
    )
