"""Real servers for the cloud storages: moto for S3 and gcp-storage-emulator for GCS, in one process of their own.

python -m tests.support.servers       prints the two ports as JSON; ends with its standard input
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BUCKET = "bucket"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIATESTTESTTESTTEST", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests"}
_START_S = 240.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the servers listen, on 127.0.0.1. Each has a bucket called `BUCKET`."""

    s3: int
    gs: int


@contextmanager
def running() -> Iterator[Ports]:
    """Both servers, for as long as the context lasts or this process lives."""
    argv = [sys.executable, "-W", "ignore", "-m", "tests.support.servers"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(argv, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], _START_S)
            assert ready, f"the servers did not start within {_START_S:.0f} s"
            yield Ports(**json.loads(process.stdout.readline()))
        finally:
            process.kill()


def main() -> None:
    """Serve until standard input ends."""
    import boto3
    import moto.backends
    import moto.s3.models
    from gcp_storage_emulator.server import create_server
    from moto.server import ThreadedMotoServer

    os.environ |= KEYS
    logging.disable(logging.CRITICAL)
    moto.s3.models.S3_UPLOAD_PART_MIN_SIZE = 1  # S3 wants 5 MiB: many bytes to move for a test of parts
    moto.backends.list_of_moto_modules = lambda: ["s3"]  # it looks through its own folder at every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    s3_port = server.get_host_and_port()[1]
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_port}", region_name="us-east-1").create_bucket(Bucket=BUCKET)
    gcs = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)
    gcs._storage._write_config_to_file = lambda: (
        None
    )  # all there is, as JSON, with every object: slow, and for no reader
    gcs.start()
    gcs._api._httpd.socket.listen(64)  # its own queue has 5 places: a connection that finds none comes a second later
    print(json.dumps({"s3": s3_port, "gs": gcs._api._httpd.server_address[1]}), flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
