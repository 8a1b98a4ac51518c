"""Judges a history: is anything lost, repeated, torn, read too early, out of order, or stuck?

Pure and streaming: the rows are gone through a few times in parts, and what is kept of them are arrays of numbers. The
rows of the witnesses are fetched in one more pass, only where something was found.
"""

from __future__ import annotations

from semel.verify.anomalies import ANOMALIES, TOLERATED, definition
from semel.verify.cases import Case
from semel.verify.evidence import gather
from semel.verify.history import History
from semel.verify.verdict import Anomaly, Verdict
from semel.verify.witnesses import witnesses_of


def check(history: History, *, witnesses_max: int = 5) -> Verdict:
    """Look for every anomaly. The same history gives the same verdict.

    >>> from semel.verify.history import Act, Manifest, Phase, Process, make_rows
    >>> send = make_rows(1, Act.SEND, Phase.INVOKE, process=0, partition=0, origin=0, sequence=0, writer=0)
    >>> told = send.copy()
    >>> told["phase"], told["offset"] = Phase.OK, 0
    >>> manifest = Manifest([("orders", 0)], [Process(0, "writer", "writer"), Process(1, "judge", "judge")])
    >>> check(History(manifest, [send.copy()])).is_clean
    True
    >>> import numpy as np
    >>> check(History(manifest, [np.concatenate((send, told))])).counts
    {'unseen': 1}
    """
    evidence = gather(history)
    results = [(anomaly, anomaly(evidence)) for anomaly in ANOMALIES]
    results = [(anomaly, found) for anomaly, found in results if found.count]
    cases: list[list[Case]] = [[f.case(n) for n in range(min(f.count, witnesses_max))] for _, f in results]
    witnesses = iter(witnesses_of(history, evidence, [case for some in cases for case in some]) if results else [])
    anomalies = [
        Anomaly(
            name=anomaly.__name__,
            definition=definition(anomaly),
            count=found.count,
            witnesses=tuple(next(witnesses) for _ in some),
            tolerated=TOLERATED.get(anomaly.__name__),
        )
        for (anomaly, found), some in zip(results, cases, strict=True)
    ]
    return Verdict(tuple(anomalies), evidence.checked)
