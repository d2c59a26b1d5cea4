"""Names, trees, links, free space, and how errors read."""

from __future__ import annotations

import errno
import os
import pickle
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dist_ckpt.errors import ForeignFileError, NoSpaceError, NotFoundError, StorageError
from dist_ckpt.storage import (
    check_space,
    exists,
    file_size,
    free_bytes,
    is_dir,
    link_or_copy,
    list_names,
    lstat,
    make_dir,
    remove_tree,
    rename,
    rename_durable,
    sync_dir,
    unlink,
    use_ops,
    write_durable,
)
from helpers.faulty_ops import Fault, FaultyOps, RecordingOps


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    make_dir(tmp_path / "d")
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


def test_a_directory_that_exists_is_refused_unless_it_may_exist(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir(mode=0o755)
    with pytest.raises(StorageError) as caught:
        make_dir(tmp_path / "d")
    assert caught.value.errno == errno.EEXIST
    make_dir(tmp_path / "d", exist_ok=True)
    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o755
    (tmp_path / "link").symlink_to(tmp_path / "d")
    make_dir(tmp_path / "link", exist_ok=True)


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(StorageError):
        make_dir(tmp_path / "f", exist_ok=True)


def test_missing_parents_are_made_on_wish_only(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        make_dir(tmp_path / "a" / "b" / "c")
    assert caught.value.errno == errno.ENOENT
    make_dir(tmp_path / "a" / "b" / "c", parents=True)
    assert (tmp_path / "a" / "b" / "c").is_dir()
    make_dir(tmp_path / "a" / "b" / "c", exist_ok=True, parents=True)


def test_a_rename_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")
    rename(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"a"
    with pytest.raises(NotFoundError):
        rename(tmp_path / "a", tmp_path / "b")


def test_a_durable_rename_syncs_both_parents(tmp_path: Path) -> None:
    for name in ("from", "to", "from/x"):
        (tmp_path / name).mkdir()
    with use_ops(RecordingOps()) as ops:
        rename_durable(tmp_path / "from" / "x", tmp_path / "to" / "x")
    assert isinstance(ops, RecordingOps)
    assert (tmp_path / "to" / "x").is_dir()
    renamed = ops.names().index("rename")
    synced = [call.path for call in ops.calls[renamed:] if call.op == "fsync"]
    assert sorted(synced) == [str(tmp_path / "from"), str(tmp_path / "to")]


def test_a_durable_rename_within_one_directory_syncs_it_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with use_ops(RecordingOps()) as ops:
        rename_durable(tmp_path / "a", tmp_path / "b")
    assert isinstance(ops, RecordingOps)
    assert len(ops.of("fsync")) == 1


@pytest.mark.parametrize("kind", ["file", "empty directory", "broken link"])
def test_a_durable_rename_never_replaces_anything(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a").mkdir()
    target = tmp_path / "b"
    if kind == "file":
        target.touch()
    elif kind == "empty directory":
        target.mkdir()
    else:
        target.symlink_to("nowhere")
    with pytest.raises(StorageError) as caught:
        rename_durable(tmp_path / "a", target)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "a").is_dir()


def test_a_durable_rename_whose_sync_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ops = FaultyOps(Fault("fsync", error="EIO"))
    with use_ops(ops), pytest.raises(StorageError):
        rename_durable(tmp_path / "a", tmp_path / "b")
    assert ops.struck == 1
    assert len(ops.of("fsync")) == 1


def test_a_directory_is_synced_and_closed(tmp_path: Path) -> None:
    with use_ops(RecordingOps()) as ops:
        sync_dir(tmp_path)
    assert isinstance(ops, RecordingOps)
    assert ops.names() == ["open", "fsync", "close"]
    with pytest.raises(NotFoundError):
        sync_dir(tmp_path / "none")
    (tmp_path / "f").touch()
    with pytest.raises(StorageError):
        sync_dir(tmp_path / "f")


def test_a_file_system_that_cant_sync_directories_is_accepted(tmp_path: Path) -> None:
    ops = FaultyOps(Fault("fsync", error="EINVAL"))
    with use_ops(ops):
        sync_dir(tmp_path)
    assert ops.struck == 1


def test_a_tree_is_removed_and_links_in_it_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    tree = tmp_path / "tree"
    (tree / "deep" / "deeper").mkdir(parents=True)
    write_durable(tree / "deep" / "read-only", b"1")
    (tree / "to-directory").symlink_to(outside)
    (tree / "to-nothing").symlink_to("nowhere")
    with use_ops(RecordingOps()) as ops:
        remove_tree(tree)
    assert isinstance(ops, RecordingOps)
    assert not tree.exists()
    assert (outside / "precious").exists()
    # Seen by the recorder, one by one: crash tests replay them.
    assert len(ops.of("rmdir")) == 3
    assert len(ops.of("unlink")) == 3


def test_removing_a_link_to_a_tree_removes_the_link_only(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").touch()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    remove_tree(tmp_path / "link")
    assert not exists(tmp_path / "link")
    assert (tmp_path / "d" / "f").exists()


def test_removing_what_isnt_there_is_fine(tmp_path: Path) -> None:
    remove_tree(tmp_path / "none")
    (tmp_path / "f").touch()
    remove_tree(tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_tree_that_vanishes_meanwhile_is_fine(tmp_path: Path) -> None:
    for op in ("lstat", "unlink", "listdir", "rmdir"):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d" / "f").touch()
        ops = FaultyOps(Fault(op, error="ENOENT"))
        with use_ops(ops):
            remove_tree(tmp_path / "d") if op != "unlink" else remove_tree(tmp_path / "d" / "f")
        assert ops.struck == 1


def test_a_tree_that_cant_be_removed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").touch()
    ops = FaultyOps(Fault("unlink", error="EACCES"))
    with use_ops(ops), pytest.raises(StorageError) as caught:
        remove_tree(tmp_path / "d")
    assert ops.struck == 1
    assert caught.value.path == str(tmp_path / "d" / "f")


def test_a_name_is_removed(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    unlink(tmp_path / "f")
    assert not (tmp_path / "f").exists()
    unlink(tmp_path / "f", missing_ok=True)
    with pytest.raises(NotFoundError):
        unlink(tmp_path / "f")
    with pytest.raises(StorageError):
        unlink(tmp_path)


def test_names_are_listed_sorted(tmp_path: Path) -> None:
    for name in ("b", "a", ".c"):
        (tmp_path / name).touch()
    assert list_names(tmp_path) == [".c", "a", "b"]
    with pytest.raises(NotFoundError):
        list_names(tmp_path / "none")
    with pytest.raises(StorageError):
        list_names(tmp_path / "a")


def test_what_exists_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"123")
    (tmp_path / "broken").symlink_to("nowhere")
    (tmp_path / "link").symlink_to(tmp_path)
    assert exists(tmp_path / "f")
    assert exists(tmp_path / "broken")
    assert not exists(tmp_path / "none")
    assert not exists(tmp_path / "f" / "below")
    assert is_dir(tmp_path)
    assert is_dir(tmp_path / "link")
    assert not is_dir(tmp_path / "f")
    assert not is_dir(tmp_path / "none")
    assert stat.S_ISLNK(lstat(tmp_path / "link").st_mode)
    assert file_size(tmp_path / "f") == 3
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(ForeignFileError):
            file_size(path)
    with pytest.raises(NotFoundError):
        file_size(tmp_path / "none")


@pytest.mark.parametrize("ask", [exists, is_dir, lstat])
def test_a_system_that_wont_tell_is_an_error(tmp_path: Path, ask: Callable[[Path], object]) -> None:
    ops = FaultyOps(Fault("*stat", error="EACCES"))
    with use_ops(ops), pytest.raises(StorageError):
        ask(tmp_path)
    assert ops.struck == 1


def test_a_hard_link_is_made_where_it_can_be(tmp_path: Path) -> None:
    write_durable(tmp_path / "a", b"data")
    assert link_or_copy(tmp_path / "a", tmp_path / "b") == "link"
    assert (tmp_path / "a").stat().st_ino == (tmp_path / "b").stat().st_ino


@pytest.mark.parametrize("error", ["EPERM", "EXDEV", "EMLINK", "EOPNOTSUPP"])
@pytest.mark.parametrize("size", [0, 5, 4 * 2**20 + 1])
def test_where_links_are_refused_it_is_a_synced_copy(tmp_path: Path, error: str, size: int) -> None:
    data = os.urandom(size)
    write_durable(tmp_path / "a", data)
    ops = FaultyOps(Fault("link", error=error))
    with use_ops(ops):
        how = link_or_copy(tmp_path / "a", tmp_path / "b")
    assert ops.struck == 1
    assert how in ("copy", "reflink")
    assert (tmp_path / "b").read_bytes() == data
    assert (tmp_path / "a").stat().st_ino != (tmp_path / "b").stat().st_ino
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o400
    assert ops.names("b")[-2:] == ["fsync", "close"]


def test_a_file_of_its_own_is_never_a_link(tmp_path: Path) -> None:
    write_durable(tmp_path / "a", b"data")
    with use_ops(RecordingOps()) as ops:
        assert link_or_copy(tmp_path / "a", tmp_path / "b", copy=True) in ("copy", "reflink")
    assert isinstance(ops, RecordingOps)
    assert ops.of("link") == []
    assert (tmp_path / "b").stat().st_nlink == 1


def test_shared_blocks_are_used_where_the_file_system_has_them(tmp_path: Path) -> None:
    class Cloning(RecordingOps):
        def clone(self, src_fd: int, dst_fd: int) -> None:
            os.pwrite(dst_fd, os.pread(src_fd, 100, 0), 0)  # what FICLONE does on xfs and btrfs

    write_durable(tmp_path / "a", b"data")
    with use_ops(Cloning()) as ops:
        assert link_or_copy(tmp_path / "a", tmp_path / "b", copy=True) == "reflink"
    assert isinstance(ops, RecordingOps)
    assert (tmp_path / "b").read_bytes() == b"data"
    assert ops.of("pwrite") == []
    assert ops.names("b")[-3:] == ["fchmod", "fsync", "close"]


@pytest.mark.parametrize("copy", [True, False])
def test_what_lies_at_the_destination_stays(tmp_path: Path, *, copy: bool) -> None:
    write_durable(tmp_path / "a", b"new")
    (tmp_path / "b").write_bytes(b"old")
    with pytest.raises(StorageError) as caught:
        link_or_copy(tmp_path / "a", tmp_path / "b", copy=copy)
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "b").read_bytes() == b"old"


@pytest.mark.parametrize("op", ["pwrite", "preadv", "fsync", "fchmod"])
def test_a_copy_that_fails_is_gone(tmp_path: Path, op: str) -> None:
    write_durable(tmp_path / "a", b"data")
    ops = FaultyOps(Fault(op, error="EIO"))
    with use_ops(ops), pytest.raises(StorageError):
        link_or_copy(tmp_path / "a", tmp_path / "b", copy=True)
    assert ops.struck == 1
    assert os.listdir(tmp_path) == ["a"]


def test_only_regular_files_are_linked(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(ForeignFileError):
            link_or_copy(path, tmp_path / "b")
    with pytest.raises(NotFoundError):
        link_or_copy(tmp_path / "none", tmp_path / "b")


def test_free_space_is_what_this_user_may_write(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    assert abs(free_bytes(tmp_path) - status.f_bavail * status.f_frsize) < 2**32
    with pytest.raises(NotFoundError):
        free_bytes(tmp_path / "none")
    with pytest.raises(NotFoundError):
        check_space(tmp_path / "none", 1)


class _Space(RecordingOps):
    """A file system of 1,000 blocks of 4 KiB, of which root could write 100 and we 50."""

    def __init__(self, *, total: int = 1000) -> None:
        super().__init__()
        self._total = total

    def statvfs(self, path: str | os.PathLike[str]) -> os.statvfs_result:
        os.statvfs(path)  # missing paths are missing
        return os.statvfs_result((4096, 4096, self._total, 100, 50, 0, 0, 0, 0, 255))


def test_space_is_checked_with_the_reserve_and_without_roots_share(tmp_path: Path) -> None:
    with use_ops(_Space()):
        assert free_bytes(tmp_path) == 50 * 4096
        check_space(tmp_path, 50 * 4096)
        check_space(tmp_path, 40 * 4096, 10 * 4096)
        with pytest.raises(NoSpaceError):
            check_space(tmp_path, 50 * 4096 + 1)
        with pytest.raises(NoSpaceError) as caught:
            check_space(tmp_path, 40 * 4096, 10 * 4096 + 1)
    assert caught.value.need_bytes == 40 * 4096
    assert caught.value.reserve_bytes == 10 * 4096 + 1
    assert caught.value.free_bytes == 50 * 4096
    assert caught.value.errno == errno.ENOSPC
    assert "204,800 bytes left" in str(caught.value)


def test_a_file_system_that_tells_no_size_is_not_refused(tmp_path: Path) -> None:
    with use_ops(_Space(total=0)):
        check_space(tmp_path, 2**60)


def test_errors_are_errors_of_the_system_too_and_survive_pickling(tmp_path: Path) -> None:
    with pytest.raises(StorageError) as caught:
        make_dir(tmp_path)
    error = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    assert isinstance(error, StorageError)
    assert isinstance(error, OSError)
    assert error.values == caught.value.values
    assert error.values["errno"] == errno.EEXIST
    assert str(tmp_path) in str(error)
    assert "EEXIST" in str(error)
    assert isinstance(caught.value.__cause__, FileExistsError)
