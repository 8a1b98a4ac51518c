"""Claiming an epoch, against a model of how the coordinator hands epochs out."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest

from semel.client.ownership import EXHAUSTED_EPOCH, Owner, ProducerIdentity, decide_claim

SEEDS = 2_000
STEPS = 12


@dataclass
class Coordinator:
    """One transactional id as Kafka keeps it: the current epoch, who holds it, and whether a transaction is open."""

    protocol: int
    epoch: int = 0
    holder: str | None = "mine"
    state: str = "Empty"

    @property
    def owner(self) -> Owner:
        return Owner(ProducerIdentity(1, self.epoch), self.state)

    def abort_by_itself(self) -> None:
        """A time-out, or the first half of a new owner's InitProducerId: the new epoch is nobody's."""
        self.epoch, self.holder, self.state = self.epoch + 1, None, "CompleteAbort"

    def welcome(self, newcomer: str) -> None:
        if self.state == "Ongoing":
            self.abort_by_itself()
        self.epoch, self.holder, self.state = self.epoch + 1, newcomer, "Empty"

    def open(self, producer: str) -> bool:
        if self.holder == producer:
            self.state = "Ongoing"
        return self.holder == producer

    def end(self, producer: str, *, commit: bool) -> bool:
        if self.holder != producer or self.state != "Ongoing":
            return False
        self.state = "CompleteCommit" if commit else "CompleteAbort"
        if self.protocol == 2:
            self.epoch += 1
        return True


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_claim_never_takes_an_epoch_that_another_producer_holds(protocol: int) -> None:
    """Whatever happened since, the identity that may be claimed is one's own or nobody's."""
    base = int(os.environ["SEMEL_SEED"])
    claims = 0
    for seed in range(base, base + SEEDS):
        chance = random.Random(seed)
        coordinator = Coordinator(protocol)
        mine = ProducerIdentity(1, 0)
        surely_open = lost_commit = was_committed = False
        if chance.random() < 0.7:
            surely_open = coordinator.open("mine")
            if chance.random() < 0.3:  # the commit is sent and its answer lost; it may have arrived or not
                lost_commit = True
                was_committed = chance.random() < 0.5 and coordinator.end("mine", commit=True)
        for _ in range(chance.randrange(STEPS)):
            event = chance.choice(["time out", "newcomer", "other begins", "other ends"])
            if event == "time out" and coordinator.state == "Ongoing":
                coordinator.abort_by_itself()
            elif event == "newcomer" and chance.random() < 0.3:
                coordinator.welcome("other")
            elif event == "other begins":
                coordinator.open("other")
            elif event == "other ends":
                coordinator.end("other", commit=chance.random() < 0.5)
        # What `Producer` knows: after a lost commit the markers told the outcome, and an abort left the next epoch
        # free.
        free = (not was_committed or protocol == 2) if lost_commit else surely_open
        claimed = decide_claim(mine, coordinator.owner, next_epoch_is_free=free)
        if claimed is not None:
            claims += 1
            assert claimed.producer_epoch == coordinator.epoch, f"seed {seed}: the coordinator would refuse it"
            assert coordinator.holder in ("mine", None), f"seed {seed}: stolen from {coordinator.holder}"
    assert claims > SEEDS // 10, "hardly anything was claimed: this proves nothing"


def test_the_end_of_the_epochs_is_claimed_under_the_old_producer_id() -> None:
    """The coordinator knows the last id as well as the new one, and answers with the new one."""
    mine = ProducerIdentity(7, EXHAUSTED_EPOCH)
    rotated = Owner(ProducerIdentity(8, 0), "CompleteCommit")
    assert decide_claim(mine, rotated, next_epoch_is_free=True) == mine
    assert decide_claim(mine, rotated, next_epoch_is_free=False) is None
