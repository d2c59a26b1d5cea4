"""What goes wrong while a generation is rewritten: named, and nothing is left of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dist_ckpt
from dist_ckpt import reshard as resharding
from dist_ckpt import storage
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    NoSpaceError,
    SettingError,
    StorageError,
    UsageError,
)
from dist_ckpt.generations import GenerationStore
from dist_ckpt.reshard import _reshard
from dist_ckpt.reshard._plan import sort_tensors
from helpers.boxes import in_memory
from helpers.generating import adam_part, change_byte, write_generation
from helpers.reliability import record_fault
from helpers.run_dirs import snapshot_of
from helpers.trainers import ROOT

STEP = "checkpoints/step_000100"


def rewrite(run: Path, ranks: int, out: Path, *, memory: int = 64 << 20) -> None:
    store = GenerationStore(run)
    job = resharding.prepare(store, store.manifest(100), ranks)
    resharding.reshard(job, out, memory_bytes=memory)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    weights = {"seven": torch.randn(7, 7), "large": torch.randn(700, 300)}
    part = adam_part(weights, buffers={"mean": torch.randn(7)})
    write_generation(tmp_path / "three", [part] * 3)
    return tmp_path / "three"


@pytest.mark.parametrize("name", ["rank_00001.shard", "rank_00002.state", ".snapshot_metadata"])
def test_a_changed_byte_of_the_source_is_named_and_nothing_is_left(
    tmp_path: Path, three: Path, name: str
) -> None:
    change_byte(three / STEP / name, 70)
    with pytest.raises(DigestMismatchError, match=re.escape(name)):
        rewrite(three, 2, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["three"]


@pytest.mark.parametrize("how", ["short", "missing"])
def test_a_short_or_missing_file_of_the_source_is_a_fault(
    tmp_path: Path, three: Path, how: str
) -> None:
    """Case 3."""
    path = three / STEP / "rank_00002.shard"
    if how == "short":
        path.chmod(0o600)
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    with pytest.raises(CorruptFileError, match=r"rank_00002\.shard"):
        rewrite(three, 2, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["three"]


def test_a_read_that_is_cut_short_is_a_fault(tmp_path: Path, three: Path) -> None:
    class Short(storage.Ops):
        strikes = 0

        def preadv(self, fd: int, buffers: Any, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("rank_00002.shard") and offset:
                Short.strikes += 1
                return 0
            return super().preadv(fd, buffers, offset)

    with storage.use_ops(Short()), pytest.raises(CorruptFileError, match=r"rank_00002\.shard"):
        rewrite(three, 2, tmp_path / "new", memory=2 << 20)
    assert Short.strikes
    assert [path.name for path in tmp_path.iterdir()] == ["three"]


def test_overlapping_parts_are_refused_though_they_add_up(tmp_path: Path) -> None:
    part = adam_part({"a": torch.randn(4, 4)})
    write_generation(tmp_path / "two", [part] * 2)
    store = GenerationStore(tmp_path / "two")
    point = store.manifest(100)
    index = dict(store.index(point))
    first, second = index["model/a"].placements
    # The upper rows twice, and the lower ones nowhere.
    again = replace(second, box=first.box)
    index["model/a"] = replace(index["model/a"], placements=(first, again))
    with pytest.raises(CorruptFileError, match="overlap"):
        sort_tensors(index, point, path="here")


def test_a_result_that_holds_other_tensors_is_not_kept(
    tmp_path: Path, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial load goes by the new manifests, whatever the digests say."""
    store = GenerationStore(three)
    job = resharding.prepare(store, store.manifest(100), 2)
    # A mistake of planning: two tensors of one shape change places in the new index.
    swapped = job.new_index.replace(b"seven%2Fexp_avg_sq", b"@").replace(
        b"seven%2Fexp_avg", b"seven%2Fexp_avg_sq"
    )
    swapped = swapped.replace(b"@", b"seven%2Fexp_avg")
    assert swapped != job.new_index
    object.__setattr__(job, "new_index", swapped)
    with pytest.raises(CorruptFileError, match="doesn't hold the same tensors"):
        resharding.reshard(job, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["three"]


def test_what_was_written_wrong_is_found_by_reading_it_back(tmp_path: Path, three: Path) -> None:
    class Flipping(storage.Ops):
        strikes = 0

        def pwrite(self, fd: int, data: Any, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("rank_00001.shard"):
                Flipping.strikes += 1
                data[100] ^= 1
            return super().pwrite(fd, data, offset)

    with storage.use_ops(Flipping()), pytest.raises(DigestMismatchError, match=r"rank_00001"):
        rewrite(three, 2, tmp_path / "new")
    assert Flipping.strikes
    assert [path.name for path in tmp_path.iterdir()] == ["three"]


def test_a_full_disk_is_found_beforehand_and_in_mid_write(tmp_path: Path, three: Path) -> None:
    """Case 4."""

    class Full(storage.Ops):
        def statvfs(self, path: Any) -> os.statvfs_result:
            found = list(super().statvfs(path))
            found[4] = 3  # f_bavail
            return os.statvfs_result(found)

    with storage.use_ops(Full()), pytest.raises(NoSpaceError):
        rewrite(three, 2, tmp_path / "new")

    class Filling(storage.Ops):
        strikes = 0

        def pwrite(self, fd: int, data: Any, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}").endswith(".state"):
                Filling.strikes += 1
                raise OSError(28, "full")
            return super().pwrite(fd, data, offset)

    with storage.use_ops(Filling()), pytest.raises(NoSpaceError):
        rewrite(three, 2, tmp_path / "new")
    assert Filling.strikes
    assert [path.name for path in tmp_path.iterdir()] == ["three"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from dist_ckpt import reshard, storage
from dist_ckpt.generations import GenerationStore

class Kills(storage.Ops):
    left = int(sys.argv[3])

    def strike(self):
        Kills.left -= 1
        if Kills.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

for name in ("open", "pwrite", "fsync", "ftruncate", "rename", "mkdir", "unlink"):
    def call(self, *args, _name=name, **named):
        self.strike()
        return getattr(storage.Ops, _name)(self, *args, **named)
    setattr(Kills, name, call)

with storage.use_ops(Kills()):
    store = GenerationStore(Path(sys.argv[1]))
    job = reshard.prepare(store, store.manifest(100), 2)
    for number in range(0, 1000, int(sys.argv[4])):
        pid = os.fork()
        if pid == 0:
            Kills.left = number
            try:
                reshard.reshard(job, sys.argv[2], memory_bytes=8 << 20)
            except BaseException as error:
                print(error, file=sys.stderr)
                os._exit(1)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(number, status, os.path.exists(sys.argv[2]), flush=True)
        if os.path.exists(sys.argv[2]):
            break
"""


def kill_at_each(stride: int) -> None:
    part = adam_part({"a": torch.randn(7, 3), "b": torch.randn(5)}, buffers={"c": torch.zeros(2)})
    with in_memory() as home:
        write_generation(home / "three", [part] * 3)
        before = snapshot_of(home / "three")
        done = subprocess.run(
            [sys.executable, "-c", _KILLED, home / "three", home / "new", "1000000", str(stride)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=110,
            check=True,
        )
        rows = [line.split() for line in done.stdout.splitlines()]
        killed = [row for row in rows if row[1] == str(-signal.SIGKILL)]
        assert len(killed) > 30 // stride, done.stderr
        # The one at which the name is there: whole, whether it was killed after that or not.
        assert [row[2] for row in rows[:-1]] == ["False"] * (len(rows) - 1)
        assert rows[-1][2] == "True"
        assert snapshot_of(home / "three") == before
        assert dist_ckpt.open_run(home / "new").generation(100).verify()
        # What the killed ones left was removed by the next.
        assert sorted(p.name for p in home.iterdir()) == ["new", "three"]
    what = "SIGKILL at operations of a reshard"
    record_fault("Kill", what, len(killed), "no name, or all of it; the next one is done")


def test_killed_at_many_operations_nothing_has_the_name_or_all_of_it() -> None:
    """Case 2. Calls that change something, from the first to the last."""
    kill_at_each(11)


@pytest.mark.slow
def test_killed_at_any_operation_nothing_has_the_name_or_all_of_it() -> None:
    """Case 2. Each of them."""
    kill_at_each(1)


# ----------------------------------------------------------------------------------------- refused


def test_what_is_there_is_never_replaced(tmp_path: Path, three: Path) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        rewrite(three, 2, tmp_path / "new")
    with pytest.raises(UsageError, match="isn't a directory"):
        rewrite(three, 2, tmp_path / "none" / "new")
    with pytest.raises(UsageError, match="inside the run that is read"):
        rewrite(three, 2, three / "checkpoints" / "new")
    with pytest.raises(UsageError, match="its name is a generation's"):
        rewrite(three, 2, tmp_path / "step_000004")
    with pytest.raises(SettingError, match="isn't a number of ranks"):
        rewrite(three, 0, tmp_path / "other")
    with pytest.raises(SettingError, match="Give at least"):
        rewrite(three, 2, tmp_path / "other", memory=1 << 16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "three"]


def test_one_that_is_under_way_is_left_alone_and_a_dead_ones_remains_go(
    tmp_path: Path, three: Path
) -> None:
    for name in ("alive", "dead"):
        (tmp_path / f".tmp-new-{name.encode().hex()[:8]:0<8}").mkdir()
    alive = tmp_path / f".tmp-new-{b'alive'.hex()[:8]}"
    lock = storage.RunLock(alive / "run.lock")
    lock.acquire({"pid": os.getpid()})
    rewrite(three, 2, tmp_path / "new")
    lock.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == [alive.name, "new", "three"]


def test_an_error_while_the_remains_are_removed_doesnt_hide_the_first(
    tmp_path: Path, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_named: Any) -> None:
        raise StorageError("the first", path="x", operation="write")

    def also_fail(_path: Any) -> None:
        raise StorageError("the second", path="x", operation="remove")

    monkeypatch.setattr(_reshard, "write_files", fail)
    monkeypatch.setattr(storage, "remove_tree", also_fail)
    with pytest.raises(StorageError, match="the first"):
        rewrite(three, 2, tmp_path / "new")
