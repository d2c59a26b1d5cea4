"""A real S3 server in a process of its own, and what a client has to know of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

KEY = "AKIA-not-to-be-shown"
SECRET = "hidden-Secret/of+the=tests"
BUCKET = "away"

_SERVER = """
import signal, sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


@dataclass
class S3Server:
    """A server that runs.

    Attributes:
        process: Its process.
        url: Where it listens.
    """

    process: subprocess.Popen[str]
    url: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What has a client use this server, as a user would set it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
        }

    def client(self) -> Any:
        """Return a client that isn't the one under test."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def objects(self) -> dict[str, int]:
        """Return key → size of all objects in the bucket."""
        found = self.client().list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return {item["Key"]: item["Size"] for item in found}


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """Give a server with one empty bucket; it is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, f"the server ended with {process.wait()}"
        server = S3Server(process, f"http://127.0.0.1:{port}")
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
