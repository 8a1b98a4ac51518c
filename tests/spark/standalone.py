"""A Spark standalone cluster on this machine: a master and two workers, each a process, with executors of one core."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession
from spark_sessions import small_spark

from semel.processes import spawn

EXECUTOR = "CoarseGrainedExecutorBackend"
WORKER = "pyspark.daemon"
EAGER_SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "200ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "2",
    "spark.speculation.minTaskRuntime": "3s",
}
"""A task that sleeps gets a twin within seconds."""
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@dataclass
class Standalone:
    """Knows which processes belong to it."""

    url: str
    worker_ids: list[int]

    def executors(self) -> list[int]:
        return [found for one in self.worker_ids for found in descendants(one) if EXECUTOR in command_of(found)]

    def python_workers(self) -> list[int]:
        """Those that run tasks: children of the daemons that Spark forks them from."""
        daemons = [found for one in self.executors() for found in descendants(one) if WORKER in command_of(found)]
        return [found for found in daemons if parent_of(found) in daemons]

    def executor_of(self, process: int) -> int:
        """Which executor this Python worker belongs to."""
        while EXECUTOR not in command_of(process):
            process = parent_of(process)
            assert process > 1, "not a process of an executor"
        return process


@contextmanager
def standalone(folder: Path) -> Iterator[Standalone]:
    """Ends with the block, with everything that it has started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"spark://127.0.0.1:{port}"
    worker = ["worker.Worker", "--cores", "1", "--memory", "600m", "--work-dir"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(_start(folder, "127.0.0.1", "master.Master", "--port", str(port)))
        _wait_listening(port, processes[0])
        # Two addresses, for Spark never gives a task and its speculative twin to one host.
        for host in ("127.0.0.1", "127.0.0.2"):
            processes.append(_start(folder, host, *worker, str(folder / f"work-{host}"), url))
        yield Standalone(url, [process.pid for process in processes[1:]])
    finally:
        for process in processes:
            for found in [*descendants(process.pid), process.pid]:
                _kill(found)
            process.wait()


def _start(folder: Path, host: str, name: str, *more: str) -> subprocess.Popen[bytes]:
    home = Path(pyspark.__file__).parent
    environment = {
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": host,
        "SPARK_DAEMON_MEMORY": "128m",
        "SPARK_DAEMON_JAVA_OPTS": _QUICK,
        # By default an application is given up after ten executors that died.
        "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
    }
    settings = [f"{key}={value}" for key, value in environment.items()]
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", "--host", host]
    return spawn(
        ["/usr/bin/env", *settings, *command, "--webui-port", "0", *more], folder=folder, output=folder / f"{name}.log"
    )


def _wait_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert process.poll() is None, "Spark's master did not start"
            assert time.monotonic() < deadline, "Spark's master does not listen"
            time.sleep(0.1)


def cluster_session(url: str, **settings: str) -> SparkSession:
    """A driver of that cluster, in this process."""
    return small_spark(
        url,
        **{
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "500m",
            "spark.executor.extraJavaOptions": _QUICK,
            "spark.executorEnv.PYTHONPATH": os.pathsep.join(sys.path),
            "spark.task.maxFailures": "8",
            "spark.locality.wait": "0",
        }
        | settings,
    )


# -- processes, as /proc shows them ----------------------------------------------------------------------------------


def parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def descendants(process: int) -> list[int]:
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [process]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill(process: int) -> bool:
    """kill -9, with the process's children; False if it is gone."""
    if not command_of(process):
        return False
    for one in (process, *descendants(process)):
        _kill(one)
    return True
