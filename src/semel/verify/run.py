"""A whole run of `semel verify`: start everything, let the faults come, bring it to rest, and judge what was left."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from semel.client.admin import Admin
from semel.client.cluster import Cluster
from semel.client.settings import parse_config
from semel.errors import InvalidState, SemelError
from semel.verify.checker import check
from semel.verify.clients.libraries import ensure_installed
from semel.verify.course import TEND_S, Course, Finished, Watch, new_folder, plan_faults, versions
from semel.verify.faults.driver import Driver
from semel.verify.faults.kinds import Chosen, choose_kinds
from semel.verify.faults.plan import (
    GROUP_REQUESTS,
    POSITION_REQUESTS,
    PROTOCOL_1_REQUESTS,
    REQUESTS,
    FaultPlan,
    Worker,
)
from semel.verify.faults.proxy import FaultProxy
from semel.verify.faults.targets import Target, parse_target
from semel.verify.history import History, Process
from semel.verify.judge import Judge
from semel.verify.supervisor import Supervisor
from semel.verify.workloads.options import Options
from semel.verify.workloads.registry import make_workload
from semel.verify.workloads.workload import Plan, WorkerPlan

_BEGIN_S: Final = 120.0
_DRAIN_S: Final = 180.0
"""How long workers may take to do nothing of what is left to do."""
_SETTLE_S: Final = 30.0


@dataclass(frozen=True)
class RunSettings:
    """What the user asks for. The same settings bring the same workload and the same plan of faults."""

    folder: Path
    target: str = "embedded"
    workload: str = "copier"
    client: str = "semel"
    faults: str | None = None
    """As of `choose_kinds`; None for all that the target can have."""
    seed: int = 0
    time_s: float = 60.0
    options: Options = field(default_factory=Options)
    transaction_version: int | None = None
    replay: Path | None = None
    """A plan or a record of faults to be carried out instead of one made from the seed."""
    has_given_input: bool = False
    """The input is no part of what is tried: sources use Semel's client, meet no fault of their own and send all of
    their `options.records`, so that runs with the same seed have the same input."""
    apis: Mapping[str, str] = field(default_factory=dict[str, str])
    """Which requests faults are planned for, and which they strike instead; {} for those that the workload makes."""
    part_of: str | None = None
    """The command of which this run is a part."""

    def command(self) -> str:
        """What runs it again."""
        if self.part_of is not None:
            return self.part_of
        words = ["semel", "verify", "--target", self.target, "--workload", self.workload, "--client", self.client]
        words += ["--seed", str(self.seed), "--time", f"{self.time_s:g}s"]
        if self.faults is not None:
            words += ["--faults", self.faults]
        if self.transaction_version is not None:
            words += ["--transaction-version", str(self.transaction_version)]
        if self.replay is not None:
            words += ["--replay", str(self.replay)]
        plain = Options()
        for name, value in vars(self.options).items():
            if value != getattr(plain, name):
                words += ["--option", f"{name}={value}"]
        return shlex.join(words)


def run(settings: RunSettings, watch: Watch = lambda _: None) -> Finished:
    """Carry out a run. Raises a SemelError if it could not be brought to its end: then there is no verdict."""
    new_folder(settings.folder)
    ensure_installed(settings.client)
    target = parse_target(
        settings.target, folder=settings.folder / "broker", transaction_version=settings.transaction_version
    )
    chosen = choose_kinds(settings.faults, target.impossible, target.flawed)
    workload = make_workload(settings.workload, f"verify-{time.time_ns():x}", settings.options)
    plan = workload.plan(settings.client, {"source": "semel"} if settings.has_given_input else None)
    with target, FaultProxy(target.bootstrap) as proxy:
        return _Run(settings, target, proxy, plan, chosen, watch).carry_out()


class _Run:
    def __init__(
        self, settings: RunSettings, target: Target, proxy: FaultProxy, plan: Plan, chosen: Chosen, watch: Watch
    ) -> None:
        self._settings = settings
        self._target = target
        self._plan = plan
        self._folder = settings.folder
        self._manifest = plan.manifest()
        self._manifest.processes.append(Process(0, "judge", "judge"))
        self._faults = self._plan_faults(chosen)
        self._judge = Judge(
            self._folder / "0.rows", number=0, bootstrap=target.bootstrap, partitions=self._manifest.partitions
        )
        self._supervisor = Supervisor(
            plan,
            self._manifest,
            folder=self._folder,
            bootstrap_of=lambda worker: target.bootstrap if self._is_spared(worker) else proxy.bootstrap,
            seed=settings.seed,
            settings={},
        )
        self._driver = Driver(
            self._faults,
            target,
            record_path=self._folder / "faults.jsonl",
            proxy=proxy,
            workers=self._supervisor,
            prefix=f"{plan.workload.prefix}-",
        )
        self._course = Course(
            self._folder,
            time_s=settings.time_s,
            faults=self._faults,
            driver=self._driver,
            judge=self._judge,
            processes=self._supervisor,
            watch=watch,
        )

    def _plan_faults(self, chosen: Chosen) -> FaultPlan:
        settings = self._settings
        # Without the prefix of this run, so that the same seed brings the same plan, and another run can replay it.
        names = {worker: worker.name for worker in self._plan.workers}
        workers = [
            Worker(name, transactional_ids=(name,) if self._is_transactional(worker) else (), client_id=name)
            for worker, name in names.items()
            if not self._is_spared(worker)
        ]
        apis = tuple(settings.apis) or (self._apis() if settings.replay is None else ())
        return plan_faults(
            settings.replay,
            seed=settings.seed,
            time_s=settings.time_s,
            chosen=chosen,
            cast=self._target.cast(workers, longest_timeout_ms=self._longest_timeout_ms, apis=apis),
            apis=settings.apis,
        )

    @property
    def _longest_timeout_ms(self) -> int:
        return max(self._settings.options.transaction_timeout_ms, self._settings.options.session_timeout_ms)

    def _apis(self) -> tuple[str, ...]:
        """What the workers ask for, so that faults do not wait for requests that nobody makes."""
        missing: set[str] = set()
        if not self._plan.has_groups:
            missing |= GROUP_REQUESTS
        if self._settings.client == "semel" and self._protocol() == 2:
            missing |= PROTOCOL_1_REQUESTS
        if not self._plan.workload.has_positions:
            missing |= POSITION_REQUESTS
        elif self._settings.options.guarantee == "exactly-once":
            missing |= {"OFFSET_COMMIT"}
        else:
            missing |= {"TXN_OFFSET_COMMIT", "ADD_OFFSETS_TO_TXN"}
        return tuple(name for name in REQUESTS if name not in missing)

    def _protocol(self) -> int:
        with Cluster(parse_config({"bootstrap.servers": self._target.bootstrap}).client) as cluster:
            return cluster.transaction_protocol

    def _is_transactional(self, worker: WorkerPlan) -> bool:
        kind = worker.role.kind
        return kind == "worker" or (kind == "source" and self._settings.options.writing == "transactions")

    def _is_spared(self, worker: WorkerPlan) -> bool:
        return self._settings.has_given_input and worker.role.kind == "source"

    # The course of a run.

    def carry_out(self) -> Finished:
        self._create_topics()
        try:
            if self._settings.has_given_input:
                # Input that is there before the workers are would be gone before the faults come.
                self._supervisor.start_all(but="source")
                self._wait_for_files(lambda file: file.exists())
            self._supervisor.start_all()
            self._wait_for_files(lambda file: file.exists() and file.stat().st_size > 0, tend=True)
            self._course.live()
            self._come_to_rest()
        finally:
            self._driver.stop()
            self._supervisor.kill_all()
            self._manifest.save(self._folder / "manifest.json")
        self._look_at_the_end()
        return self._judge_history()

    def _create_topics(self) -> None:
        self._course.tell("creating topics")
        with Admin({"bootstrap.servers": self._target.bootstrap}) as admin:
            for topic, partitions in self._plan.topics.items():
                admin.create_topics(topic, partitions=partitions, replication=self._settings.options.replication)

    def _wait_for_files(self, is_there: Callable[[Path], bool], *, tend: bool = False) -> None:
        """Time counts from when everybody is at work: on a busy machine it takes seconds to load a client library."""
        deadline = time.monotonic() + _BEGIN_S
        files = [self._folder / f"{process.number}.rows" for process in self._manifest.processes[1:]]
        while not all(map(is_there, files)):
            self._course.tell("waiting for the workers")
            if tend:
                self._supervisor.tend()
            if time.monotonic() > deadline:
                raise InvalidState(
                    f"Not every worker began to work within {_BEGIN_S:g} s: see the logs in {self._folder}."
                )
            time.sleep(TEND_S)

    def _come_to_rest(self) -> None:
        """No more faults. First the sources end, then, when nothing is left to do, the workers, then the readers."""
        deadline = time.monotonic() + _DRAIN_S
        while self._settings.has_given_input and not self._supervisor.is_done("source"):
            self._supervisor.tend()
            if time.monotonic() > deadline:
                raise InvalidState(
                    f"The input was not written within {_DRAIN_S:g} s after the faults: is the rate low?"
                )
            self._course.tell("waiting for the rest of the input")
            time.sleep(TEND_S)
        self._course.tell("stopping the sources")
        self._supervisor.stop(["source"])
        deadline, least = time.monotonic() + _DRAIN_S, None
        while (backlog := self._backlog()) != 0:
            self._supervisor.tend()
            if backlog is not None and (least is None or backlog < least):
                deadline, least = time.monotonic() + _DRAIN_S, backlog  # much may be left to do, as long as it is done
            if time.monotonic() > deadline:
                break  # the checker finds what is missing, and says so with evidence
            self._course.tell("draining", self._judge.look())
            time.sleep(TEND_S)
        self._course.tell("stopping the workers")
        self._supervisor.stop(["worker"])
        self._course.tell("waiting for open transactions")
        self._judge.wait_stable(self._settings.options.transaction_timeout_ms / 1000 + _SETTLE_S)
        self._supervisor.stop(["reader"])

    def _backlog(self) -> int | None:
        """None while it cannot be known."""
        try:
            return self._plan.workload.backlog({"bootstrap.servers": self._target.bootstrap})
        except SemelError:
            return None

    def _look_at_the_end(self) -> None:
        self._course.tell("reading everything")
        try:
            self._judge.wait_stable(_SETTLE_S)
            self._judge.read_all()
        finally:
            self._judge.close()

    def _judge_history(self) -> Finished:
        self._course.tell("checking")
        found = check(History.in_folder(self._folder))
        return self._course.finish(found, self._facts(), longest_timeout_ms=self._longest_timeout_ms)

    def _facts(self) -> Mapping[str, Any]:
        settings = self._settings
        return {
            "workload": settings.workload,
            "client": settings.client,
            "guarantee": settings.options.guarantee,
            "target": self._target.name if settings.target in ("embedded", "kafka") else settings.target,
            "seed": settings.seed,
            "time_s": settings.time_s,
            "command": settings.command(),
            "fenced": self._supervisor.fenced,
            "versions": versions("semel", settings.client),
            "notes": [
                f"{library}: no {gap.feature}, {gap.reason}; {gap.instead}" for library, gap in self._plan.gaps()
            ],
        }
