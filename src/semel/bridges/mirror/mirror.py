"""`semel.mirror`: topics from cluster to cluster, each record once, and no transaction of the source torn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from semel.bridges.mirror.options import BUFFER_BYTES, CUT_BYTES, RETRY_S, OnGap, make_options
from semel.bridges.mirror.report import MirrorProgress, MirrorReport
from semel.bridges.mirror.run import MirrorRun
from semel.bridges.sigterm_end import ends_on_sigterm


def mirror(
    *,
    name: str,
    source: str | Mapping[str, object],
    target: str | Mapping[str, object],
    topics: str | Iterable[str],
    rename: str = "{topic}",
    groups: str | None = ".*",
    lost: OnGap = "stop",
    recreated: OnGap = "stop",
    cut_bytes: int = CUT_BYTES,
    buffer_bytes: int = BUFFER_BYTES,
    follow_s: float = 10.0,
    groups_s: float = 1.0,
    retry_s: float = RETRY_S,
    stop: threading.Event | None = None,
    idle_ms: float | None = None,
    end_on_sigterm: bool = True,
    on_ready: Callable[[], None] | None = None,
    on_progress: Callable[[MirrorProgress], None] | None = None,
) -> MirrorReport:
    """Mirror topics until `stop` is set, or until nothing has come for `idle_ms`.

    A reader of committed records at the target sees every transaction of the source whole or not at all, and each
    record once, in the order of its partition. A second mirror of the same `name` takes over from the first.
    `docs/mirror.md` says what else holds, and what does not.

        source, target   "host:port", or settings of Kafka's clients
        topics           a regular expression for whole names, or a list of names
        rename           the name at the target, with {topic} in it ("{topic}")
        groups           the groups whose positions are carried, as a regular expression (".*"); None for none
        lost             what to do if records were deleted before they were mirrored: "stop", or "go-on"
        recreated        what to do if a topic was deleted and created again: "stop", or "go-on" with the new one
        cut_bytes        about how large a transaction at the target may be, if that tears nothing (32 MB)
        buffer_bytes     how much is kept in memory; what is beyond it is read a second time (256 MB)
        follow_s         how often topics and configs are looked at (10)
        groups_s         how often groups are looked at (1)
        retry_s          for how many seconds a lost cluster is tried again (900)
        on_progress      called once a second with a `MirrorProgress`

    >>> mirror(name="west", source="a:9092", target="b:9092", topics="orders|payments")  # doctest: +SKIP
    MirrorReport(records=3, cuts=1, loops=0, lost=0)
    """
    options = make_options(
        name,
        {"bootstrap.servers": source} if isinstance(source, str) else source,
        {"bootstrap.servers": target} if isinstance(target, str) else target,
        topics,
        rename=rename,
        groups=groups,
        lost=lost,
        recreated=recreated,
        cut_bytes=cut_bytes,
        buffer_bytes=buffer_bytes,
        follow_s=follow_s,
        groups_s=groups_s,
        retry_s=retry_s,
    )
    with ends_on_sigterm("mirror", stop, watches=end_on_sigterm) as is_over:
        run = MirrorRun(options, is_over, on_progress)
        run.go(idle_ms, on_ready)
    return run.report
