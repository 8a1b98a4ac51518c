"""Hostile input for the broker: `python -m semel.verify.hostile` runs all of it.

Requests of every API and version, whole, cut off at each byte and spoiled, are given to a broker in this process; the
only outcomes allowed are a right answer and a closed connection. Then a broker in a process of its own gets spoiled
frames, absurd sizes, slow and silent clients over sockets (`hostile_sockets`).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from semel.verify.hostile_frames import FrameMaker, mutate, served
from semel.verify.hostile_host import HostileHost, Violation
from semel.verify.hostile_sockets import hostile_clients
from semel.verify.memory import rss_bytes

RSS_GROWTH_BYTES_MAX: Final = 256 << 20
"""What the frames of one broker's life may add to the memory of the process, garbage of the allocator included."""
FRAMES_PER_BROKER: Final = 20_000
_FRAMES_PER_REVIVAL: Final = 1_000


@dataclass(slots=True)
class Tally:
    """What came of the frames."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    slowest_s: float = 0.0
    rss_growth_bytes: int = 0

    def __str__(self) -> str:
        outcomes = ", ".join(f"{count:,} {what}" for what, count in sorted(self.outcomes.items()))
        return (
            f"{outcomes}; slowest frame {self.slowest_s * 1000:.0f} ms, "
            f"memory grew by {self.rss_growth_bytes / 2**20:.0f} MiB"
        )


Work = Callable[[HostileHost, FrameMaker, random.Random, Tally], Awaitable[None]]


async def offer_valid(seed: int, rounds: int = 3) -> Tally:
    """Requests with plausible values: all are answered, or wait."""
    return await _on_host(seed, lambda host, maker, chance, tally: _valid(host, maker, rounds, tally))


async def _valid(host: HostileHost, maker: FrameMaker, rounds: int, tally: Tally) -> None:
    number = 0
    for _ in range(rounds):
        for api, version in served():
            number += 1
            body = maker.frame(api, version, number)[4:]
            tally.outcomes[await host.offer(body, must_be_answered=True)] += 1


async def offer_truncated(seed: int, every: int = 1) -> Tally:
    """Each API and version cut off at each byte, or at each `every`-th of them, which one being left to chance."""
    return await _on_host(seed, lambda host, maker, chance, tally: _truncated(host, maker, every, chance, tally))


async def _truncated(host: HostileHost, maker: FrameMaker, every: int, chance: random.Random, tally: Tally) -> None:
    for api, version in served():
        body = maker.frame(api, version, 1)[4:]
        for length in range(chance.randrange(every), len(body), every):
            tally.outcomes[await host.offer(body[:length])] += 1


async def offer_mutated(seed: int, frames: int) -> Tally:
    """Spoiled frames, on one broker after another, each of which starts again in the end on what they have left."""
    total = Tally()
    for number in range(0, frames, FRAMES_PER_BROKER):
        count = min(FRAMES_PER_BROKER, frames - number)
        tally = await _on_host(
            seed + number, lambda host, maker, chance, tally, count=count: _mutated(host, maker, count, chance, tally)
        )
        total.outcomes += tally.outcomes
        total.slowest_s = max(total.slowest_s, tally.slowest_s)
        total.rss_growth_bytes = max(total.rss_growth_bytes, tally.rss_growth_bytes)
    return total


async def _mutated(host: HostileHost, maker: FrameMaker, count: int, chance: random.Random, tally: Tally) -> None:
    everything = list(served())
    samples: list[bytes] = []
    for number in range(count):
        if number % _FRAMES_PER_REVIVAL == 0:
            await host.revive(maker.world)
            samples = [maker.frame(api, version, number)[4:] for api, version in everything]
        tally.outcomes[await host.offer(mutate(chance.choice(samples), chance))] += 1
    await host.restart()
    await _valid(host, maker, 1, Tally())


async def _on_host(seed: int, work: Work) -> Tally:
    chance = random.Random(seed)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="semel-hostile-") as folder:
        host = HostileHost(Path(folder))
        await host.start()
        try:
            world = await host.populate()
            before = rss_bytes()
            try:
                await work(host, FrameMaker(world, chance), chance, tally)
            except Violation as violation:
                raise Violation(f"{violation}\n(seed {seed}, after {tally.outcomes.total():,} frames)") from violation
            tally.rss_growth_bytes = rss_bytes() - before
        finally:
            await host.stop()
    tally.slowest_s = host.slowest_s
    if tally.rss_growth_bytes > RSS_GROWTH_BYTES_MAX:
        raise Violation(f"the memory grew by {tally.rss_growth_bytes:,} bytes (seed {seed})")
    return tally


def run_sockets(seed: int, frames: int) -> None:
    """Everything over sockets, in full."""
    with hostile_clients(seed) as clients:
        print(f"spoiled over sockets: {dict(clients.send_mutated(frames))}", flush=True)
        clients.announce_absurd_sizes()
        clients.stop_amid_large_frames(clients=12, sent_bytes=60 << 20)
        print(f"beside 200 slow clients: {clients.send_byte_by_byte(200) * 1000:.0f} ms for an answer", flush=True)
        clients.end_half_way(200)
        print(f"beside 1,000 idle ones: {clients.connect_and_do_nothing(1_000) * 1000:.0f} ms", flush=True)
        clients.storm(3_000)
        clients.never_read(clients=150, requests=100)
        clients.check_transaction()
        print(f"the broker held {clients.highest_rss_bytes / 2**20:.0f} MiB at most", flush=True)
    with tempfile.TemporaryDirectory(prefix="semel-hostile-") as folder:
        users = Path(folder, "users")
        users.touch(mode=0o600)
        users.write_text("ann=secret\n")
        arguments = ["--listener", "SASL_PLAINTEXT://127.0.0.1:0", "--users", str(users)]
        with hostile_clients(seed, arguments=arguments) as clients:
            clients.announce_absurd_sizes_before_login("ann", "secret")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="spoiled frames in this process")
    parser.add_argument("--socket-frames", type=int, default=20_000, help="spoiled frames over sockets")
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    print(f"valid: {asyncio.run(offer_valid(options.seed))}", flush=True)
    print(f"cut off at each byte: {asyncio.run(offer_truncated(options.seed))}", flush=True)
    print(f"spoiled: {asyncio.run(offer_mutated(options.seed, options.frames))}", flush=True)
    run_sockets(options.seed, options.socket_frames)


if __name__ == "__main__":
    main()
