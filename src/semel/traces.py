"""OpenTelemetry traces, on request: one span for each transaction of a sink, session or relay.

`semel[otel]` installs the API and the SDK; where spans go is set up as in any program. `on()` or SEMEL_TRACES=1 begins.
With `headers=True` or SEMEL_TRACES=headers the context goes along in the headers of records that sessions and relays
write, and what a session reads is linked to the spans that wrote it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from semel.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer, TracerProvider

VARIABLE: Final = "SEMEL_TRACES"
LINKS_MAX: Final = 128
"""How many spans a session's span is linked to: what a portion of many small transactions names beyond is left out."""
_LOG: Final = logging.getLogger("semel.traces")
_tracer: Tracer | None = None
_with_headers = False
_was_asked = False


def on(tracer_provider: TracerProvider | None = None, *, headers: bool = False) -> None:
    """Make a span of each transaction from now on, with the given provider or the program's own.

    >>> on()
    >>> off()
    """
    global _tracer, _with_headers
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise ConfigError("Traces need OpenTelemetry: pip install 'semel[otel]'. Nothing was changed.") from error
    _tracer = trace.get_tracer("semel", tracer_provider=tracer_provider)
    _with_headers = headers


def off() -> None:
    """Make no more spans."""
    global _tracer, _with_headers
    _tracer, _with_headers = None, False


def set_up_if_asked() -> None:
    """Do what SEMEL_TRACES says, once in a process. What is missing for it must not stop a pipeline."""
    global _was_asked
    wanted = os.environ.get(VARIABLE)
    if not wanted or _was_asked:
        return
    _was_asked = True
    try:
        if wanted not in ("1", "headers"):
            raise ConfigError(f"{VARIABLE}={wanted!r} is not understood: write 1 or headers.")
        on(headers=wanted == "headers")
    except ConfigError as error:
        _LOG.warning("There are no traces: %s", error)


# -- for the parts -----------------------------------------------------------------------------------------------------


def wants_headers() -> bool:
    """Whether records carry the context."""
    return _tracer is not None and _with_headers


def start_span(name: str, attributes: Mapping[str, Any], carried: Collection[str] = ()) -> Span | None:
    """A span that is linked to the contexts that records have carried; None without traces."""
    if _tracer is None:
        return None
    from opentelemetry.trace import Link

    links = [Link(context) for context in map(_span_context, carried) if context.is_valid]
    return _tracer.start_span(name, attributes=_without_none(attributes), links=links)


def add_attributes(span: Span | None, attributes: Mapping[str, Any]) -> None:
    if span is not None:
        span.set_attributes(_without_none(attributes))


def add_event(span: Span | None, name: str, attributes: Mapping[str, Any]) -> None:
    if span is not None:
        span.add_event(name, _without_none(attributes))


def end_span(span: Span | None, outcome: str, problem: BaseException | str | None = None) -> None:
    """End a span; one with a problem has the status error."""
    if span is None:
        return
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("semel.outcome", outcome)
    if isinstance(problem, BaseException):
        span.record_exception(problem)
    if problem is not None:
        span.set_status(Status(StatusCode.ERROR, str(problem)))
    span.end()


def make_current(span: Span | None) -> object:
    """Let spans that begin from here on be its children. Returns what `restore` takes."""
    if span is None:
        return None
    from opentelemetry import context, trace

    before = context.get_current()
    context.attach(trace.set_span_in_context(span))
    return before


def restore(before: Any) -> None:
    if before is not None:
        from opentelemetry import context

        context.attach(before)  # not `detach`: asyncio may end a block in another context than it began in


def carried_context(span: Span | None = None) -> str | None:
    """The value of the header `traceparent` for records that are written now; None if they carry nothing.

    >>> carried_context() is None
    True
    """
    if not wants_headers():
        return None
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    context = None if span is None else trace.set_span_in_context(span)
    TraceContextTextMapPropagator().inject(carrier, context)
    return carrier.get("traceparent")


def _span_context(traceparent: str) -> Any:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
    return trace.get_current_span(context).get_span_context()


def _without_none(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
