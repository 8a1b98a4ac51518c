"""What a form sends."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qs

from starlette.requests import Request

from semel.web.site import WrongAddress

_BYTES_MAX: Final = 16 << 10
_FIELDS_MAX: Final = 20


async def read_form(request: Request) -> dict[str, str]:
    """Its fields, the first of each name."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _BYTES_MAX:
            raise WrongAddress("The form is too large. Nothing was changed.")
    try:
        return {name: values[0] for name, values in parse_qs(body.decode(), max_num_fields=_FIELDS_MAX).items()}
    except ValueError as error:
        raise WrongAddress("The form cannot be read. Nothing was changed.") from error
