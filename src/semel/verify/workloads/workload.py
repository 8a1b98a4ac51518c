"""What a workload is: topics, what is asked of them, and the processes that work on them.

A supervisor creates the topics of a plan, starts a process for each of its workers (see `semel.verify.worker`), starts
it again when it was killed or fenced, and in the end judges the histories by the plan's manifest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from semel.errors import ConfigError
from semel.verify.clients.libraries import Gap, find_library
from semel.verify.history import Isolation, Manifest, Process
from semel.verify.workloads.life import Life, WorkerSpec
from semel.verify.workloads.options import Guarantee, Options
from semel.verify.workloads.roles import live_as_reader


@dataclass(frozen=True, slots=True)
class Role:
    """So many processes do the same. Sources are to be stopped first, and the others when no backlog is left."""

    name: str
    count: int
    kind: Literal["source", "worker", "reader"]
    isolation: Isolation = "read_committed"


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One client, over all of its lives."""

    name: str
    role: Role
    index: int
    library: str


@dataclass(frozen=True)
class Plan:
    """A workload with a client library for each of its workers."""

    workload: Workload
    workers: tuple[WorkerPlan, ...]

    @property
    def topics(self) -> dict[str, int]:
        """The topics to create, with their numbers of partitions; `options.replication` is theirs too."""
        return self.workload.topics()

    def manifest(self) -> Manifest:
        """Without processes: one is added for each life, as of `process`."""
        return self.workload.manifest()

    def process(self, worker: WorkerPlan, *, number: int, life: int = 0) -> Process:
        role: Literal["writer", "reader"] = "reader" if worker.role.kind == "reader" else "writer"
        return Process(number, f"{worker.name}/{life}", role, worker.role.isolation)

    def spec(
        self,
        worker: WorkerPlan,
        *,
        folder: Path,
        number: int,
        bootstrap: str,
        seed: int,
        life: int = 0,
        settings: Mapping[str, Any] | None = None,
    ) -> WorkerSpec:
        """What the process is told that is to live this life."""
        return WorkerSpec(
            folder=str(folder.absolute()),
            number=number,
            name=worker.name,
            life=life,
            role=worker.role.name,
            index=worker.index,
            count=worker.role.count,
            workload=self.workload.name,
            prefix=self.workload.prefix,
            library=worker.library,
            bootstrap=bootstrap,
            partitions=self.workload.partitions(),
            seed=seed,
            settings=dict(settings or {}),
            options=asdict(self.workload.options),
        )

    @property
    def has_groups(self) -> bool:
        """Whether any of the workers is a member of a group."""
        return any(self.workload.has_group(worker.library) for worker in self.workers)

    def gaps(self) -> list[tuple[str, Gap]]:
        """What the libraries in use cannot do, by library: to be shown to the user."""
        used = dict.fromkeys(worker.library for worker in self.workers)
        return [(name, gap) for name in used for gap in find_library(name).gaps]


class Workload(ABC):
    """Its topics, groups and transactional ids all begin with `prefix`, so that runs do not meet."""

    name: ClassVar[str]
    summary: ClassVar[str]
    guarantees: ClassVar[Sequence[Guarantee]] = ("exactly-once",)
    has_positions: ClassVar[bool] = False
    """Whether workers put the positions of a group into their transactions."""

    def __init__(self, prefix: str, options: Options | None = None) -> None:
        self.prefix = prefix
        self.options = options or Options()
        if self.options.guarantee not in self.guarantees:
            raise ConfigError(f"{self.name} cannot be {self.options.guarantee}: only the copier can.")

    # What a supervisor asks.

    @abstractmethod
    def topics(self) -> dict[str, int]: ...

    @abstractmethod
    def work_roles(self) -> list[Role]: ...

    def manifest(self) -> Manifest:
        return Manifest(self.partitions())

    def partitions(self) -> list[tuple[str, int]]:
        return [(topic, index) for topic, count in self.topics().items() for index in range(count)]

    def roles(self) -> list[Role]:
        readers = [
            Role("reader", self.options.readers, "reader"),
            Role("uncommitted-reader", self.options.uncommitted_readers, "reader", "read_uncommitted"),
        ]
        return [role for role in (*self.work_roles(), *readers) if role.count]

    def plan(self, library: str = "semel", libraries: Mapping[str, str] | None = None) -> Plan:
        """One library for all roles, or others for some of them: `{"reader": "confluent-kafka"}`."""
        chosen = dict(libraries or {})
        names = [role.name for role in self.roles()]
        if unknown := sorted(set(chosen) - set(names)):
            raise ConfigError(f"{self.name} has no role {', '.join(unknown)}: it has {', '.join(names)}.")
        for name in (library, *chosen.values()):
            find_library(name)
        return Plan(
            self,
            tuple(
                WorkerPlan(f"{role.name}-{index}", role, index, chosen.get(role.name, library))
                for role in self.roles()
                for index in range(role.count)
            ),
        )

    def has_group(self, library: str) -> bool:
        """Whether workers with this library share their input as members of a group."""
        return False

    def backlog(self, settings: Mapping[str, Any]) -> int:
        """How far the workers are behind their input, in offsets; `settings` are those of a client of Semel's."""
        return 0

    # What a worker process does.

    def live(self, life: Life) -> None:
        """One life in the role of `life.spec`, until it is told to stop; raises `Fenced` if that is how it ends."""
        if life.spec.role in ("reader", "uncommitted-reader"):
            isolation: Isolation = "read_committed" if life.spec.role == "reader" else "read_uncommitted"
            live_as_reader(life, range(len(life.spec.partitions)), isolation)
        else:
            self.work(life)

    @abstractmethod
    def work(self, life: Life) -> None:
        """One life in one of the `work_roles`."""

    def numbers_of(self, topic: str) -> list[int]:
        """The numbers of a topic's partitions, which follow each other."""
        return [number for number, (name, _) in enumerate(self.partitions()) if name == topic]
