"""The cluster's sockets, without a broker."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from semel.client.cluster import wait_readable  # pyright: ignore[reportPrivateUsage]


def test_sockets_are_waited_for_beyond_the_first_thousand_file_descriptors() -> None:
    """A process with many open files can still read an answer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2_048:
        pytest.fail("this machine allows too few open files to prove anything")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2_048), hard))
    filler = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_100)]
    left, right = socket.socketpair()
    try:
        assert right.fileno() > 1_023
        left.sendall(b"answer")
        assert wait_readable([right], 1.0) == [right]  # type: ignore[list-item]
    finally:
        for each in filler:
            os.close(each)
        left.close()
        right.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
