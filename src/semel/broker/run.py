"""The broker's process: start, say where it listens, and stop cleanly when told to.

Run as a module by `semel broker` and by `semel.Broker()`; it imports as little as it can, so that it is there at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from typing import Final

from semel.broker.descriptors import raise_limit
from semel.broker.garbage import ShortCollections
from semel.broker.loop_watch import LoopWatch
from semel.broker.shifted_clock import shifted_clock
from semel.broker.state import Broker, BrokerOptions
from semel.broker.storage.limited_disk import limited_disk
from semel.errors import SemelError

_SWITCH_INTERVAL_S: Final = 0.001
READY: Final = "semel broker ready on "
_LOG: Final = logging.getLogger("semel.broker")


def run(
    options: BrokerOptions, *, metrics_port: int | None = None, ui_port: int | None = None, log_level: str = "info"
) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code of the process."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr, level=log_level.upper())
    if os.environ.get("SEMEL_LOG"):  # then `semel.logs` has a handler and a level of its own
        logging.getLogger("semel").setLevel(log_level.upper())
    try:
        watch = LoopWatch(is_measuring=metrics_port is not None)
        with asyncio.Runner(loop_factory=watch.new_loop) as runner:
            return runner.run(_serve(options, metrics_port, ui_port, watch))
    except BrokenPipeError:  # the program that was to read the ready line has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (SemelError, OSError) as error:
        print(f"semel broker cannot start: {error}", file=sys.stderr)
        return 1


async def _serve(options: BrokerOptions, metrics_port: int | None, ui_port: int | None, watch: LoopWatch) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(code: int) -> None:
        if not stopped.done():
            stopped.set_result(code)

    def fatal(error: Exception) -> None:
        # No goodbye: what is in memory may say more than what is on disk, and must not be told to anybody.
        _LOG.critical("the broker ends: %s", error)
        os._exit(70)

    # Long computations run in a thread beside the loop, which must get the interpreter back at once when it has work.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop, 0)
    raise_limit()
    broker = Broker(options, clock=shifted_clock(), disk=limited_disk(), on_fatal=fatal)
    await broker.start()
    collections = ShortCollections(broker.clock, broker.metrics.requests.total)
    collections.start()
    metrics: asyncio.Server | None = None
    page: subprocess.Popen[bytes] | None = None
    try:
        if metrics_port is not None:
            from semel.broker.metrics_page import serve_metrics

            metrics = await serve_metrics(broker, metrics_port, watch)
        print(f"{READY}{broker.bootstrap}", flush=True)
        if ui_port is not None:
            from semel.broker.page import start_page

            page = start_page(options.listeners, broker.ports(), ui_port)
        return await stopped
    finally:
        if page is not None:
            from semel.broker.page import stop_page

            await asyncio.to_thread(stop_page, page)
        if metrics is not None:
            metrics.close()
        collections.stop()
        await broker.stop()
