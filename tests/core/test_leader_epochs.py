"""Who led a log, and when, against a list that has one entry for every offset."""

from __future__ import annotations

import random

import pytest
from kio.schema.errors import ErrorCode

from semel.core.leader_epochs import UNDEFINED, LeaderEpochs
from semel.core.refusal import Refused


class EveryOffset:
    """The slow way: the epoch of each offset, and of the leader who would write the next one."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.current = -1

    def end_of(self, epoch: int) -> tuple[int, int]:
        if not 0 <= epoch <= self.current:
            return UNDEFINED
        end = next((offset for offset, found in enumerate(self.epochs) if found > epoch), len(self.epochs))
        known = sorted({*self.epochs, self.current})
        earlier = [found for found in known if found <= epoch]
        return (earlier[-1] if earlier else epoch, end)


def test_the_end_of_every_epoch_is_where_the_next_one_wrote(rng: random.Random) -> None:
    """Leaders come, some write nothing, and each question is answered as the list of all offsets answers it."""
    for _ in range(300):
        epochs, model = LeaderEpochs(), EveryOffset()
        for _ in range(rng.randint(1, 8)):
            model.current += rng.randint(1, 3)
            epochs.begin(model.current, len(model.epochs))
            model.epochs += [model.current] * rng.choice((0, 0, 1, 5))
            epochs.begin(rng.randint(-1, model.current), rng.randint(0, 20))  # what is known changes nothing
        again = LeaderEpochs(epochs.entries)
        for known in (epochs, again):
            for epoch in range(-1, model.current + 2):
                assert known.end_of(epoch, len(model.epochs)) == model.end_of(epoch)
            assert [known.of(offset) for offset in range(len(model.epochs))] == model.epochs
            assert known.latest == model.current


def test_clients_of_another_leader_are_told_which_way_they_are_wrong() -> None:
    """An older epoch is fenced, one that has not been is unknown, and -1 does not ask."""
    epochs = LeaderEpochs([(0, 0), (3, 10)])
    epochs.check_current(3)
    epochs.check_current(-1)
    for epoch, code in ((2, ErrorCode.fenced_leader_epoch), (4, ErrorCode.unknown_leader_epoch)):
        with pytest.raises(Refused) as refused:
            epochs.check_current(epoch)
        assert refused.value.code is code
