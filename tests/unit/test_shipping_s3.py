"""``dist-ckpt ship`` to a real S3 server."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dist_ckpt.errors import StorageError
from dist_ckpt.runs import open_run
from dist_ckpt.shipping import _remote, parse_place
from dist_ckpt.shipping._items import content_of_bytes, measure
from dist_ckpt.shipping._remote import RemoteFolder
from dist_ckpt.shipping._sending import untold
from helpers.faulty_ops import Fault, faults_environment, read_strikes
from helpers.reliability import record_fault
from helpers.run_dirs import Called, call, ended_run, spawn
from helpers.s3_server import BUCKET, KEY, SECRET, S3Server, s3_server
from helpers.trainers import ROOT

pytestmark = pytest.mark.timeout(180)

FOLDER = "small-step_000012"
CHILD = """
import sys
from helpers.faulty_ops import install_from_environment
from dist_ckpt.cli import main
install_from_environment()
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def running() -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    return running


def ship_until_killed(fault: Fault, log: Path, *arguments: str | Path) -> int:
    """Return how ``dist-ckpt ship ARGUMENTS`` ended, in a process of its own."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **faults_environment([fault], log=log)}
    return spawn("ship", *arguments, code=CHILD, env=env).returncode


def sent(called: Called) -> list[str]:
    found: list[str] = called.json["sent"]
    return [name.rpartition("/")[2] for name in found]


def test_a_run_comes_back_from_s3_by_the_commands_of_its_own_page(
    server: S3Server, tmp_path: Path
) -> None:
    """Requirement K13: the folder restores on a machine without the original."""
    run_dir = ended_run(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    called = call("ship", run_dir, f"s3://{BUCKET}/whole", "--scratch", scratch)
    assert (called.status, called.err) == (0, "")
    assert f"s3://{BUCKET}/whole/{FOLDER}: shipped and confirmed" in called.out
    assert list(scratch.iterdir()) == []
    keys = {key for key in server.objects() if key.startswith("whole/")}
    assert f"whole/{FOLDER}/confirmation.json" in keys
    assert f"whole/{FOLDER}/unfinished.json" not in keys
    losses = open_run(run_dir).loss()
    shutil.rmtree(run_dir)

    client = server.client()
    page = client.get_object(Bucket=BUCKET, Key=f"whole/{FOLDER}/RESTORE.md")["Body"].read()
    fetch, check, _ = re.findall(r"```sh\n(.*?)```", page.decode(), re.DOTALL)
    folder = Path(sys.executable).parent
    env = {**os.environ, **server.environment, "PATH": f"{folder}:{os.environ['PATH']}"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for commands in (fetch, check):
        done = subprocess.run(
            ["/bin/bash", "-euc", commands],
            cwd=elsewhere,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
    back = open_run(elsewhere / "runs/small")
    assert [generation.step for generation in back.generations()] == [12]
    assert back.loss() == losses


def test_a_shipment_to_s3_that_was_killed_goes_on_and_wrong_copies_are_sent_again(
    server: S3Server, tmp_path: Path
) -> None:
    run_dir = ended_run(tmp_path)
    place = f"s3://{BUCKET}/cut"
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    log = tmp_path / "strikes"
    # Opened to be measured, and a second time to be sent.
    fault = Fault("open", path="*/rank_00000.state", nth=2, kill=True)
    assert ship_until_killed(fault, log, run_dir, place, "--scratch", scratch) == -9
    assert len(read_strikes(log)) == 1
    keys = server.objects()
    assert f"cut/{FOLDER}/unfinished.json" in keys
    assert f"cut/{FOLDER}/checkpoints/step_000012/rank_00000.shard" in keys
    assert f"cut/{FOLDER}/confirmation.json" not in keys
    assert "being shipped to" in open_run(run_dir).store.pins()[12]

    again = call("ship", run_dir, place, "--scratch", scratch, "--json")
    assert again.status == 0, again.err
    assert "rank_00000.shard" not in sent(again)
    assert "rank_00000.state" in sent(again)
    assert dict(open_run(run_dir).store.pins()) == {}
    assert list(scratch.iterdir()) == []
    what = f"SIGKILL of a shipment to S3 at {fault.op} of {fault.path}"
    record_fault("Kill", what, 1, "isn't confirmed, and goes on")

    client = server.client()
    shard = f"cut/{FOLDER}/checkpoints/step_000012/rank_00000.shard"
    data = bytearray(client.get_object(Bucket=BUCKET, Key=shard)["Body"].read())
    data[100] ^= 0xFF
    client.put_object(Bucket=BUCKET, Key=shard, Body=bytes(data))
    client.delete_object(Bucket=BUCKET, Key=f"cut/{FOLDER}/small.loss.json")
    mended = call("ship", run_dir, place, "--scratch", scratch, "--json")
    assert mended.status == 0, mended.err
    assert sorted(sent(mended)) == ["rank_00000.shard", "small.loss.json"]
    assert mended.json["found_wrong"] == ["checkpoints/step_000012/rank_00000.shard"]
    assert client.get_object(Bucket=BUCKET, Key=shard)["Body"].read() == (
        (run_dir / "checkpoints/step_000012/rank_00000.shard").read_bytes()
    )


def test_credentials_are_in_no_file_and_in_no_message(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = ended_run(tmp_path)
    said = [call("ship", run_dir, f"s3://{KEY}:{SECRET}@{BUCKET}/named", "--debug")]
    said.append(call("ship", run_dir, f"s3://{BUCKET}/hidden?X-Amz-Signature={SECRET}"))
    said.append(call("ship", run_dir, f"s3://{BUCKET}-missing/x", "--debug"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    said.append(call("ship", run_dir, f"s3://{BUCKET}/x", "--debug"))
    assert [called.status for called in said[2:]] == [2, 2]
    texts = [text for called in said for text in (called.out, called.err)]
    texts += [path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()]
    client = server.client()
    for key in server.objects():
        body = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
        texts.append(body.decode(errors="replace"))
    for text in texts:
        assert SECRET not in text
        assert KEY not in text
    assert "Could not" in said[3].err
    assert f"s3://{BUCKET}/x" in said[3].err


def test_a_large_file_goes_in_parts_and_one_that_is_cut_off_leaves_no_object(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_remote, "_PART_BYTES", 5 << 20)  # the least that S3 takes
    data = os.urandom(12 << 20)

    def whole() -> Iterator[bytes]:
        for start in range(0, len(data), 4 << 20):
            yield data[start : start + (4 << 20)]

    item = measure(replace(content_of_bytes("a/large", data), chunks=whole), untold)
    folder = RemoteFolder(parse_place(f"s3://{BUCKET}/parts"), "there")
    assert list(folder.names()) == []
    folder.write(item, untold)
    assert server.objects()["parts/there/a/large"] == len(data)
    etag = server.client().head_object(Bucket=BUCKET, Key="parts/there/a/large")["ETag"]
    assert etag.endswith('-2"')  # of two parts
    assert folder.is_right(item, untold, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == data
    assert list(folder.names()) == ["a"]

    def cut_off() -> Iterator[bytes]:
        yield data[: 6 << 20]
        yield data[6 << 20 : 11 << 20]
        raise StorageError("The source is gone.", next_step="Look for it.")

    broken = replace(item, content=replace(item.content, name="a/broken", chunks=cut_off))
    with pytest.raises(StorageError, match="source is gone"):
        folder.write(broken, untold)
    gc.collect()  # a file object that is let go of must not complete the upload
    assert folder.size("a/broken") is None
    assert "parts/there/a/broken" not in server.objects()
    assert "Uploads" not in server.client().list_multipart_uploads(Bucket=BUCKET)


def test_who_gives_no_credentials_is_told_to(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give the same command again wouldn't help."""
    run_dir = ended_run(tmp_path)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    called = call("ship", run_dir, f"s3://{BUCKET}/nobody")
    assert called.status == 2
    assert "NoCredentialsError" in called.err
    assert "AWS_ACCESS_KEY_ID" in called.err
