"""A whole run of `semel verify --command`: a user's program under faults, brought to rest, and its topics judged."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from semel.client.admin import Admin
from semel.errors import ConfigError, InvalidState, SemelError
from semel.verify.clients.face import Surroundings
from semel.verify.clients.libraries import ensure_installed, open_clients
from semel.verify.course import TEND_S, Course, Finished, Progress, Watch, new_folder, plan_faults, versions
from semel.verify.faults.driver import Driver, Record
from semel.verify.faults.kinds import Chosen, FaultKind, choose_kinds
from semel.verify.faults.plan import Worker
from semel.verify.faults.proxy import FaultProxy
from semel.verify.faults.targets import RemoteTarget, Target, parse_target
from semel.verify.history import Manifest, Process
from semel.verify.judge import Judge
from semel.verify.programs.findings import Times, kills_while_writing, verdict_of, write_findings
from semel.verify.programs.input_writer import InputWriter
from semel.verify.programs.program import CommandLine, Program, described
from semel.verify.programs.records import Finding, Generator, Rule, TopicRecord
from semel.verify.programs.requests_seen import RequestsSeen
from semel.verify.programs.rules import DEFINITIONS, parse_rule
from semel.verify.programs.settings import ProgramSettings
from semel.verify.programs.topics import Watcher, count_written, read_topic
from semel.verify.programs.user_functions import checked_generator, load_function, plain_generator
from semel.verify.workloads.options import Options

_NEAR_S: Final = 10.0
"""For so long after a fault a program may fail of it."""
_FAILURES_AT_FIRST: Final = 3
_FAILURES_AT_LAST: Final = 5
_CALM_S: Final = 3.0
"""Input comes for so long after the last fault: whether the program goes on is seen by what it makes of it."""
_LOOK_S: Final = 1.0
_QUIET_S: Final = 2.0
_SETTLE_S: Final = 5.0
_LONG_PAUSES: Final = (FaultKind.ZOMBIE, FaultKind.STORM)
_COMPLETE: Final = frozenset({"repeated", "wrong", "out_of_order"})
"""Findings that do not go away by waiting."""


def run_program(settings: ProgramSettings, watch: Watch = lambda _: None) -> Finished:
    """Carry out a run. Raises a SemelError if there is nothing to judge: the command never worked, for example."""
    options = settings.all_options()
    settings.check_topics()
    ensure_installed(settings.client)
    line = CommandLine.parse(settings.command)
    rule = parse_rule(settings.rule, settings.outputs)
    if settings.generator is None:
        make = plain_generator(settings.seed, keys=options.keys, record_bytes=options.record_bytes)
    else:
        make = checked_generator(load_function(settings.generator, "--generator"))
    target = parse_target(
        settings.target, folder=settings.folder / "broker", transaction_version=settings.transaction_version
    )
    chosen = choose_kinds(settings.faults, {**target.impossible, **_impossible(options.workers)}, target.flawed)
    new_folder(settings.folder)
    with target, FaultProxy(target.bootstrap) as proxy:
        run = _ProgramRun(settings, options, target, proxy.bootstrap, line, make, watch)
        return run.carry_out(rule, chosen, proxy)


def _impossible(instances: int) -> dict[FaultKind, str]:
    """The faults that a command cannot have, and why."""
    reasons = {FaultKind.HIJACK: "the transactional.id of a command is not known"}
    if instances > 1:
        reasons[FaultKind.CRASH] = "with several instances it is not known which of them a request is from"
    return reasons


class _ProgramRun:
    def __init__(
        self,
        settings: ProgramSettings,
        options: Options,
        target: Target,
        bootstrap: str,
        line: CommandLine,
        make: Generator,
        watch: Watch,
    ) -> None:
        self._settings = settings
        self._options = options
        self._target = target
        self._watch = watch
        self._folder = settings.folder.absolute()
        topics = [settings.input, *settings.outputs]
        self._manifest = Manifest([(topic, index) for topic in topics for index in range(options.partitions)])
        self._manifest.processes += [
            Process(0, "judge", "judge"),
            Process(1, "input", "writer"),
            Process(2, "watcher", "reader"),
        ]
        self._zero_ns = time.monotonic_ns()
        self._wall_ahead_ns = time.time_ns() - self._zero_ns
        self._judge = Judge(
            self._folder / "0.rows", number=0, bootstrap=target.bootstrap, partitions=self._manifest.partitions
        )
        self._writer = InputWriter(
            self._folder / "1.rows",
            process=1,
            bootstrap=target.bootstrap,
            topic=settings.input,
            make=make,
            rate=options.rate,
        )
        surroundings = Surroundings(target.bootstrap, self._manifest.partitions, "semel-verify-watcher")
        numbers = {n: place for n, place in enumerate(self._manifest.partitions) if place[0] != settings.input}
        self._watcher = Watcher(
            self._folder / "2.rows", process=2, clients=open_clients(settings.client, surroundings), numbers=numbers
        )
        state = self._folder / "state"
        state.mkdir()
        self._program = Program(
            line,
            folder=self._folder,
            values={
                "bootstrap": bootstrap,
                "input": settings.input,
                "output": ",".join(settings.outputs),
                "folder": str(state),
            },
            instances=options.workers,
            is_fault_near=lambda: self._driver is not None and self._driver.is_near(_NEAR_S),
        )
        self._seen = RequestsSeen()
        self._driver: Driver | None = None
        self._longest_timeout_ms = 0
        self._count = 0
        self._notes: list[str] = []

    # What the course of the run asks.

    @property
    def lives(self) -> int:
        return self._program.lives

    def tend(self) -> None:
        self._program.tend()
        self._writer.raise_failure()
        self._watcher.raise_failure()
        count = self._watcher.count
        if count != self._count:
            self._count = count
            self._program.works()

    # The course of the run.

    def carry_out(self, rule: Rule, chosen: Chosen, proxy: FaultProxy) -> Finished:
        proxy.observe = self._seen
        self._create_topics()
        try:
            self._begin()
            self._plan(chosen, proxy)
            self._course.live()
            trouble = self._come_to_rest(rule)
        finally:
            if self._driver is not None:
                self._driver.stop()
            self._program.kill_all()
            self._writer.stop()
            self._watcher.stop()
            self._manifest.save(self._folder / "manifest.json")
        self._judge.close()
        return self._judge_topics(rule, trouble)

    def _plan(self, chosen: Chosen, proxy: FaultProxy) -> None:
        """Plan the faults when it is known which requests the program makes: a fault that waits for others is none."""
        settings = self._settings
        workers = [
            Worker(name, may_have_transactions=True, is_alone=len(self._program.names) == 1)
            for name in self._program.names
        ]
        self._longest_timeout_ms = self._seen.longest_timeout_ms(settings, self._options)
        cast = self._target.cast(workers, longest_timeout_ms=self._longest_timeout_ms, apis=self._seen.apis())
        faults = plan_faults(settings.replay, seed=settings.seed, time_s=settings.time_s, chosen=chosen, cast=cast)
        if settings.faults is not None and (
            unplanned := [kind for kind in chosen.rates if kind not in faults.counts()]
        ):
            self._notes.append(
                f"The run was too short for {', '.join(unplanned)}: a zombie and a storm must outlast "
                f"{self._longest_timeout_ms / 1000:g} s. Give it more --time, or the command shorter timeouts."
            )
        record_path = self._folder / "faults.jsonl"
        self._driver = Driver(faults, self._target, record_path=record_path, proxy=proxy, workers=self._program)
        self._course = Course(
            self._folder,
            time_s=settings.time_s,
            faults=faults,
            driver=self._driver,
            judge=self._judge,
            processes=self,
            watch=self._watch,
        )

    def _create_topics(self) -> None:
        self._tell("creating topics")
        with Admin({"bootstrap.servers": self._target.bootstrap}) as admin:
            topics = [self._settings.input, *self._settings.outputs]
            if there := sorted(set(topics) & set(admin.list_topics())):
                raise ConfigError(
                    f"{', '.join(there)} exists already on {self._settings.target}: a run writes records that mean "
                    "nothing, so it only uses topics that it has created. Name others, or delete these."
                )
            for topic in topics:
                admin.create_topics(topic, partitions=self._options.partitions, replication=self._options.replication)

    def _tell(self, stage: str) -> None:
        """Before the faults are planned."""
        elapsed_s = (time.monotonic_ns() - self._zero_ns) / 1e9
        self._watch(Progress(stage, elapsed_s, self._program.lives))

    def _begin(self) -> None:
        """Return when the command has written something: time counts from then on."""
        self._watcher.start()
        self._writer.start()
        deadline = time.monotonic() + self._options.patience_s
        while self._watcher.count == 0:
            self._tell("waiting for the first output")
            self.tend()
            if self._program.failures_in_a_row >= _FAILURES_AT_FIRST:
                raise InvalidState(self._failing())
            if time.monotonic() > deadline:
                raise InvalidState(
                    f"The command wrote nothing that is committed to {', '.join(self._settings.outputs)} within "
                    f"{self._options.patience_s:g} s, before any fault, so there is nothing to judge. Does it hang, or "
                    f"read another topic than {self._settings.input}? Its last lines:\n{self._program.last_words()}\n"
                    f"All of them are in {self._program.log_path(self._program.names[0])}."
                )
            time.sleep(TEND_S)

    def _come_to_rest(self, rule: Rule) -> list[Finding]:
        """Stop the input, wait until the outputs are complete and quiet, and stop the command."""
        until = time.monotonic() + _CALM_S
        while time.monotonic() < until:
            self._course.tell("no more faults")
            self.tend()
            time.sleep(TEND_S)
        self._writer.stop()
        self._writer.raise_failure()
        trouble = self._wait_complete(rule)
        self._course.tell("stopping the command")
        self._program.stop()
        self._course.tell("waiting for open transactions")
        if not self._judge.wait_stable(self._options.transaction_timeout_ms / 1000 + _SETTLE_S):
            self._notes.append(
                "When the command was stopped, it left a transaction open. Its records were judged as not committed."
            )
        return trouble

    def _wait_complete(self, rule: Rule) -> list[Finding]:
        """Returns why it cannot be completed, if that is seen from the command rather than from its topics."""
        inputs = self._read_inputs()
        changed_at = time.monotonic()
        count, findings, ended = -1, None, 0
        while True:
            self._course.tell("waiting for the last outputs", self._judge.look())
            self.tend()
            if self._program.failures_in_a_row >= _FAILURES_AT_LAST:
                return [Finding("keeps_failing", self._failing())] if findings is None or findings else []
            if self._watcher.count != count:
                count, changed_at, findings = self._watcher.count, time.monotonic(), None
            quiet_s = time.monotonic() - changed_at
            if findings is None and quiet_s >= _LOOK_S:
                findings = _apply(rule, inputs, self._read_outputs())
                ended = self._program.done
            if findings is not None and quiet_s >= self._patience_s(findings, inputs, ended):
                return self._hung(findings, inputs)
            time.sleep(TEND_S)

    def _patience_s(self, findings: Sequence[Finding], inputs: Sequence[TopicRecord], ended: int) -> float:
        """How long nothing more must come. Records behind the missing ones tell that the program went past them."""
        patience_s = self._options.patience_s
        if {finding.kind for finding in findings} <= _COMPLETE:
            # A batch job gets one more life: it must not repeat what it has done.
            return patience_s if self._program.done and self._program.done == ended else _QUIET_S
        if all(finding.kind in _COMPLETE | {"lost", "torn"} for finding in findings) and not _last_lost(
            findings, inputs
        ):
            return patience_s / 3
        return patience_s

    def _hung(self, findings: Sequence[Finding], inputs: Sequence[TopicRecord]) -> list[Finding]:
        left = _last_lost(findings, inputs)
        if not left or not self._program.is_running:
            return []
        text = (
            f"The command was running and wrote nothing for {self._options.patience_s:g} s, though input was left, up "
            f"to {', '.join(map(str, left))}. Its last lines:\n{self._program.last_words()}"
        )
        return [Finding("hung", text)]

    def _judge_topics(self, rule: Rule, trouble: Sequence[Finding]) -> Finished:
        self._course.tell("reading everything")
        inputs, outputs = self._read_inputs(), self._read_outputs()
        written = sum(
            count_written(self._target.bootstrap, topic, self._options.partitions) for topic in self._settings.outputs
        )
        self._course.tell("checking")
        findings = [*_apply(rule, inputs, outputs), *self._watcher.dirty(outputs), *trouble]
        checked = {"records": len(inputs), "outputs": len(outputs), "not_committed": written - len(outputs)}
        kills, met = kills_while_writing(self._records, self._watcher.times_ns)
        if kills:
            checked["kills_while_writing"] = met
        self._note(findings, kills, met)
        times = Times(self._zero_ns, self._time_of, self._records)
        write_findings(self._folder / "findings.jsonl", findings, times)
        found = verdict_of(findings, checked, times)
        longest_ms = max(self._seen.timeouts_ms.values(), default=self._longest_timeout_ms)
        return self._course.finish(found, self._facts(), longest_timeout_ms=longest_ms, notes=self._notes)

    # What is known, and what is said.

    @property
    def _records(self) -> list[Record]:
        return [] if self._driver is None else self._driver.records

    def _read_inputs(self) -> list[TopicRecord]:
        return read_topic(self._target.bootstrap, self._settings.input, self._options.partitions)

    def _read_outputs(self) -> list[TopicRecord]:
        return [
            record
            for topic in self._settings.outputs
            for record in read_topic(self._target.bootstrap, topic, self._options.partitions)
        ]

    def _time_of(self, record: TopicRecord) -> int | None:
        """When an input was written, or an output seen."""
        if record.topic == self._settings.input and record.timestamp_ms >= 0:
            return record.timestamp_ms * 1_000_000 - self._wall_ahead_ns
        return self._watcher.saw_at_ns(record)

    def _failing(self) -> str:
        last = self._program.ended[-1]
        return (
            f"The command keeps failing, with no fault near: {described(last.status)}, "
            f"{self._program.failures_in_a_row} times in a row. Its last lines:\n{last.last_words}"
        )

    def _note(self, findings: Sequence[Finding], kills: int, met: int) -> None:
        """What a user should know besides the verdict."""
        own = [one for one in self._program.ended if not one.is_explained]
        if own:
            at_s = (own[0].at_ns - self._zero_ns) / 1e9
            self._notes.append(
                f"The command failed {len(own)} times with no fault near, first at {at_s:.1f} s with "
                f"{described(own[0].status)}: {own[0].last_words.splitlines()[-1]}"
            )
        if self._records and not any(record.outcome == "done" for record in self._records):
            self._notes.append(f"None of the {len(self._records)} faults met anything.")
        if kills and not met:
            self._notes.append(
                "No kill met the command while it was writing, so this run says little. It may have been waiting "
                "for its group: give it fewer kills, a shorter session.timeout.ms, or a group.instance.id."
            )
        pauses = [record for record in self._records if record.fault.kind in _LONG_PAUSES]
        longer = {name: ms for name, ms in self._seen.timeouts_ms.items() if ms > self._longest_timeout_ms}
        if pauses and longer:
            told = ", ".join(f"{name}={ms}" for name, ms in longer.items())
            options = " ".join(f"--option {name.replace('.', '_')}={ms}" for name, ms in longer.items())
            self._notes.append(
                f"The command has {told}. The pauses were shorter, so nobody gave the command up in its sleep. Give it "
                f"shorter timeouts, or make the pauses longer: {options}."
            )
        if self._program.done:
            self._notes.append(f"The command ended by itself {self._program.done} times and was started again.")
        if any(record.offset == 0 for one in findings if one.kind == "lost" for record in one.records):
            self._notes.append(
                f"The first records of {self._settings.input} are among the lost: a command that starts at the latest "
                "offset does not see what was there before it. Let it start at the earliest."
            )

    def _facts(self) -> Mapping[str, Any]:
        settings = self._settings
        return {
            "workload": settings.command,
            "client": settings.client,
            "target": settings.target if isinstance(self._target, RemoteTarget) else self._target.name,
            "title": f"{settings.command}: {settings.input} to {', '.join(settings.outputs)}, rule {settings.rule}",
            "checks": dict(DEFINITIONS),
            "seed": settings.seed,
            "time_s": settings.time_s,
            "command": settings.again(),
            "options": asdict(self._options),
            "versions": versions("semel", settings.client),
            "notes": self._notes,
        }


def _apply(rule: Rule, inputs: Sequence[TopicRecord], outputs: Sequence[TopicRecord]) -> list[Finding]:
    try:
        findings = list(rule(inputs, outputs))
    except SemelError:
        raise
    except Exception as error:  # it is the user's code
        raise InvalidState(f"The rule failed, so there is no verdict: {type(error).__name__}: {error}.") from error
    if strange := [finding for finding in findings if not isinstance(finding, Finding)]:
        raise InvalidState(f"The rule returned {strange[0]!r}: it returns objects of semel.verify.Finding.")
    return findings


def _last_lost(findings: Sequence[Finding], inputs: Sequence[TopicRecord]) -> list[TopicRecord]:
    """The last inputs of partitions, where they are among the lost: then the program may not have come so far yet."""
    lasts = {record.partition: record for record in inputs}
    lost = {record for finding in findings if finding.kind == "lost" for record in finding.records}
    return [record for record in lasts.values() if record in lost]
