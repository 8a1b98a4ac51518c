"""Which partition of an internal topic holds a transactional id or a group: Kafka's own rule."""

from __future__ import annotations

from functools import lru_cache


def java_string_hash(text: str) -> int:
    """Java's `String.hashCode`: over UTF-16 code units, as a signed 32-bit number.

    >>> java_string_hash("hello"), java_string_hash("polygenelubricants")
    (99162322, -2147483648)
    """
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (31 * value + unit) & 0xFFFFFFFF
    else:
        # Lone surrogates, which Java strings may hold, pass too.
        units = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(units[::2], units[1::2], strict=True):
            value = (31 * value + (high << 8 | low)) & 0xFFFFFFFF
    return value - 0x100000000 if value & 0x80000000 else value


@lru_cache(maxsize=4096)
def coordinator_partition(name: str, partitions: int) -> int:
    """The partition of `__transaction_state` or `__consumer_offsets`, having `partitions`, that `name` belongs to.

    >>> coordinator_partition("my-pipeline", 50)
    27
    """
    value = java_string_hash(name)
    # Kafka's absolute value of the smallest number, which has no positive twin in 32 bits, is 0.
    return 0 if value == -0x80000000 else abs(value) % partitions
