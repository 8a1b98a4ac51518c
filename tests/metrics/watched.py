"""Metrics and spans of a test, read as their users read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext
from prometheus_client.parser import text_string_to_metric_families

import semel


def samples(part: str, pipeline: str) -> dict[str, float]:
    """A pipeline's samples by name, with the outcome or the class of the error behind a colon."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(semel.metrics.text()):
        for sample in family.samples:
            if sample.name.startswith(f"semel_{part}_") and sample.labels.get("pipeline") == pipeline:
                more = [value for name, value in sample.labels.items() if name not in ("pipeline", "le")]
                if "le" not in sample.labels:
                    found[":".join([sample.name.removeprefix(f"semel_{part}_"), *more])] = sample.value
    return found


class Spans:
    """What an exporter got."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


def context_of(span: ReadableSpan) -> SpanContext:
    assert span.context is not None
    return span.context


@contextmanager
def traced(*, headers: bool = False) -> Iterator[Spans]:
    spans = Spans()
    semel.traces.on(spans.provider, headers=headers)
    try:
        yield spans
    finally:
        semel.traces.off()
        spans.provider.shutdown()
