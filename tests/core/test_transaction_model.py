"""Random histories of several clients at one coordinator: repeats, lost answers, time-outs, restarts."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
from coordinator_driver import Answer, Driver
from kio.schema.errors import ErrorCode
from transaction_model import NOTHING, Model, Request

from semel.core.transactions import ProducerIdentity, TransactionMetadata, TransactionSettings

NAMES = ("x", "y")
AGENTS = ("a", "b", "c")
PARTITIONS = (("t", 0), ("t", 1), ("u", 0))
HISTORIES = 250
STEPS = 80


class Clients:
    """Three clients per transactional id. A client uses only identities that it was given and told."""

    def __init__(self, chance: random.Random, feature: int) -> None:
        self.chance = chance
        self.has_two_phase = feature == 2
        self.driver = Driver(TransactionSettings(transaction_version=feature, two_phase_commit=self.has_two_phase))
        self.model = Model(self.driver)
        # One protocol for all, or both at one id.
        versions = chance.choice([(0, 0, 0), (2, 2, 2), (0, 2, 2)])
        self.versions: dict[str, int] = dict(zip(AGENTS, versions, strict=True))
        self.known: dict[tuple[str, str], list[ProducerIdentity]] = {}
        self.history: list[Request] = []
        self.restarted = False
        if chance.random() < 0.5:
            self.start_near_the_last_epoch()

    def start_near_the_last_epoch(self) -> None:
        for number, name in enumerate(NAMES):
            self.driver.coordinator.replay(
                TransactionMetadata(name, number, number, producer_epoch=32_763, last_update_ms=self.driver.now_ms)
            )
            self.model.producer_ids.add(number)
            self.know(name, "a", ProducerIdentity(number, 32_763))
            self.model.owners[ProducerIdentity(number, 32_763)] = "a"
            self.send(Request("init", "a", name, ProducerIdentity(number, 32_763)))

    def step(self) -> None:
        name, agent = self.chance.choice(NAMES), self.chance.choice(AGENTS)
        ordinary = [self.begin_anew, self.go_on, self.add, self.add, self.end, self.end, self.repeat_what_was_answered]
        rare = [self.arrive_late, self.complete, self.wait, self.restart]
        acts = ordinary * 2 + rare + ([self.forget] if self.chance.random() < 0.1 else [])
        self.chance.choice(acts)(name, agent)
        unfinished = {metadata.transactional_id for metadata in self.driver.coordinator.unfinished()}
        prepared = {m.transactional_id for m in self.driver.coordinator if m.status.title.startswith("Prepare")}
        assert unfinished == prepared

    def begin_anew(self, name: str, agent: str) -> None:
        self.send(Request("init", agent, name, **self.flags()))

    def go_on(self, name: str, agent: str) -> None:
        if identity := self.identity(name, agent):
            self.send(Request("init", agent, name, identity, **self.flags()))

    def flags(self) -> dict[str, Any]:
        """KIP-939, where there is protocol 2: all four, since one client may use it and the next one not."""
        if not self.has_two_phase:
            return {}
        return {"two_phase": self.chance.random() < 0.4, "keep_prepared": self.chance.random() < 0.6}

    def add(self, name: str, agent: str) -> None:
        if identity := self.identity(name, agent):
            partitions = frozenset(self.chance.sample(PARTITIONS, self.chance.randint(1, 2)))
            self.send(Request("add", agent, name, identity, partitions, client_version=self.versions[agent]))

    def end(self, name: str, agent: str) -> None:
        if identity := self.identity(name, agent):
            committed, version = self.chance.random() < 0.5, self.versions[agent]
            self.send(Request("end", agent, name, identity, committed=committed, client_version=version))

    def arrive_late(self, name: str, agent: str) -> None:
        """Any request of before comes once more."""
        if self.history:
            self.send(self.chance.choice(self.history[-10:]))

    def repeat_what_was_answered(self, name: str, agent: str) -> None:
        """Once the markers are written, the same answer as the first time."""
        if name not in self.model.last_answered:
            return
        request, first = self.model.last_answered[name]
        if request.kind == "init" and request.identity == NOTHING:
            return  # a new incarnation each time
        self.driver.complete()
        again = self.send(request)
        if not self.may_be_fenced(request) or again is not ErrorCode.producer_fenced:
            assert again == first

    def may_be_fenced(self, request: Request) -> bool:
        """As in Kafka, a repeated InitProducerId is not known again after these."""
        if request.kind != "init":
            return False
        was_forgotten = request == self.model.created_by.get(request.transactional_id)
        # Version 0 of the log does not keep the last epoch.
        return was_forgotten or (self.restarted and self.driver.settings.transaction_version == 0)

    def complete(self, name: str, agent: str) -> None:
        self.driver.complete()

    def wait(self, name: str, agent: str) -> None:
        self.driver.now_ms += self.chance.choice([1, 400, 999, 1_000, 1_001])
        self.model.time_out()
        # To the millisecond: what is not late yet is so one after its deadline.
        deadline_ms = self.driver.coordinator.next_deadline_ms()
        if deadline_ms is not None and self.chance.random() < 0.5:
            for now_ms in (deadline_ms - 1, deadline_ms):
                self.driver.now_ms = max(now_ms, self.driver.now_ms)
                self.model.time_out()

    def forget(self, name: str, agent: str) -> None:
        self.driver.now_ms += self.driver.settings.expiration_ms
        self.model.expire()

    def restart(self, name: str, agent: str) -> None:
        """Recovery is what was there before, also from a compacted log and with a clock that went back."""
        before = {metadata.transactional_id: self.kept(metadata) for metadata in self.driver.coordinator}
        deadline_ms, unfinished = self.driver.coordinator.next_deadline_ms(), self.driver.coordinator.unfinished()
        self.driver.restart(compacted=self.chance.random() < 0.5)
        self.driver.now_ms -= self.chance.choice([0, 0, 300])
        self.restarted = True
        assert {metadata.transactional_id: metadata for metadata in self.driver.coordinator} == before
        assert self.driver.coordinator.next_deadline_ms() == deadline_ms
        assert set(self.driver.coordinator.unfinished()) == {self.kept(metadata) for metadata in unfinished}

    def kept(self, metadata: TransactionMetadata) -> TransactionMetadata:
        if self.driver.settings.transaction_version > 0:
            return metadata
        return replace(metadata, previous_producer_id=-1, last_producer_epoch=-1)

    def finish(self) -> None:
        """Whatever happened, a new incarnation gets in, and then nobody else does."""
        for name in NAMES:
            self.driver.complete()
            owner = self.model.send(Request("init", "new", name))
            if owner is ErrorCode.concurrent_transactions:
                self.driver.complete()
                owner = self.model.send(Request("init", "new", name))
            assert isinstance(owner, ProducerIdentity)
            for agent in AGENTS:
                for identity in self.known.get((name, agent), []):
                    assert self.driver.add(identity, transactional_id=name) is not ErrorCode.none
                    assert isinstance(self.driver.end(identity, committed=True, transactional_id=name), ErrorCode)
                    assert isinstance(self.driver.init(identity, transactional_id=name), ErrorCode)
        assert self.driver.coordinator.unfinished() == []

    def identity(self, name: str, agent: str) -> ProducerIdentity | None:
        """Mostly the newest that the client knows."""
        identities = self.known.get((name, agent), [])
        age = self.chance.choice([0, 0, 0, 0, 1, 2])
        return identities[-1 - age] if age < len(identities) else None

    def send(self, request: Request) -> Answer:
        self.history.append(request)
        answer = self.model.send(request)
        is_lost = self.chance.random() < 0.3
        if not is_lost and isinstance(answer, ProducerIdentity) and answer != NOTHING:
            self.know(request.transactional_id, request.agent, answer)
        return answer

    def know(self, name: str, agent: str, identity: ProducerIdentity) -> None:
        self.known.setdefault((name, agent), []).append(identity)


@pytest.mark.parametrize("feature", [0, 1, 2])
def test_what_the_model_says_holds_in_every_history(feature: int) -> None:
    """B1-B7: one owner per epoch, one outcome, repeats that find their answer, recovery equal to live."""
    base = int(os.environ["SEMEL_SEED"])
    for number in range(HISTORIES):
        seed = f"{base}-{feature}-{number}"
        clients = Clients(random.Random(seed), feature)
        try:
            for _ in range(STEPS):
                clients.step()
            clients.finish()
        except AssertionError as error:
            error.add_note(f"history {seed} (repeat with SEMEL_SEED={base})")
            raise
