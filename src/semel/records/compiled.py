"""The compiled kernel, or None where it could not be built: the reference codec serves then, after one warning."""
# pyarrow comes without types, so what it returns is unknown to the checker.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pyarrow as pa

try:
    from semel.records import kernel
except ImportError as missing:
    warnings.warn(
        "Semel's compiled codec is missing, so that records are read and written in plain Python, some 200 times as "
        "slowly. It is built when Semel is installed, and could not be: that needs a C compiler and Python's headers "
        f"(apt-get install gcc python3-dev), or a wheel for this platform. ({missing})",
        RuntimeWarning,
        stacklevel=2,
    )
    kernel = None

if TYPE_CHECKING:
    from semel.records.kernel import StringColumn


def string_column(array: pa.Array) -> StringColumn:
    """A binary or large_binary array as the kernel takes it."""
    assert kernel is not None
    return kernel.StringColumn(array.buffers(), array.offset, len(array), pa.types.is_large_binary(array.type))
