"""A checkpoint in a bucket, on a server that speaks S3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from semel.errors import ConfigError
from semel.spark.python_files import PythonFiles

pytestmark = [pytest.mark.chaos, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CHECKPOINT = "s3a://checkpoints/orders"
KEYS = {"AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests", "AWS_DEFAULT_REGION": "us-east-1"}


@dataclass(frozen=True)
class Bucket:
    """The bucket `checkpoints` of a server."""

    endpoint: str

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=KEYS["AWS_DEFAULT_REGION"],
        )


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        made = Bucket(f"http://{host}:{port}")
        made.client().create_bucket(Bucket="checkpoints")
        yield made
    finally:
        server.stop()


def test_a_bucket_that_python_cannot_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> None:
    """Only the process that commits for the format reads from Python."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": bucket.endpoint}.items():
        monkeypatch.setenv(name, value)
    files = PythonFiles()
    assert files.read(f"{CHECKPOINT}/metadata") is None
    assert not files.has_state(CHECKPOINT)
    files.write(f"{CHECKPOINT}/state/0/0", "kept")
    assert files.has_state(CHECKPOINT)
    assert files.read(f"{CHECKPOINT}/state/0/0") == "kept"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"cannot be read from Python on the driver .* nothing was written"):
        files.read(f"{CHECKPOINT}/metadata")
