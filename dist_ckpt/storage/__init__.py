"""The only place that opens, syncs, renames or deletes files of a run. Layer 2, I/O.

All system calls go through one seam, ``Ops``, which tests replace to record operations and to
inject faults. Errors of the system become named errors with path, operation and number. All new
files are private to the user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dist_ckpt.later import imported_later
from dist_ckpt.storage._append import AppendFile
from dist_ckpt.storage._arena import Arena, no_memory
from dist_ckpt.storage._buffers import Buffers
from dist_ckpt.storage._digest import FileDigest, digest_bytes
from dist_ckpt.storage._link import link_or_copy, share_file
from dist_ckpt.storage._lock import RunLock, lock_holder
from dist_ckpt.storage._names import (
    device_of,
    exists,
    file_size,
    is_dir,
    list_names,
    longest_name_bytes,
    lstat,
    make_dir,
    remove_tree,
    rename,
    rename_durable,
    require_no_link,
    sync_dir,
    sync_file,
    sync_names,
    unlink,
)
from dist_ckpt.storage._ops import (
    PAGE_BYTES,
    PIECE_BYTES,
    Ops,
    get_ops,
    last_moved,
    round_up,
    use_ops,
)
from dist_ckpt.storage._pool import for_each, hand_on
from dist_ckpt.storage._shard import write_shard
from dist_ckpt.storage._small import read_file, read_head, replace_durable, write_durable
from dist_ckpt.storage._space import check_space, free_bytes
from dist_ckpt.storage._stream import StreamWriter
from dist_ckpt.storage._write_behind import ForwardWriter

if TYPE_CHECKING:
    from dist_ckpt.storage._read import Segment, read_piece, read_segments
    from dist_ckpt.storage._read_ahead import ForwardReader
    from dist_ckpt.storage._verify import map_file, sha256_file, verify_file

__all__ = [
    "PAGE_BYTES",
    "PIECE_BYTES",
    "AppendFile",
    "Arena",
    "Buffers",
    "FileDigest",
    "ForwardReader",
    "ForwardWriter",
    "Ops",
    "RunLock",
    "Segment",
    "StreamWriter",
    "check_space",
    "device_of",
    "digest_bytes",
    "exists",
    "file_size",
    "for_each",
    "free_bytes",
    "get_ops",
    "hand_on",
    "is_dir",
    "last_moved",
    "link_or_copy",
    "list_names",
    "lock_holder",
    "longest_name_bytes",
    "lstat",
    "make_dir",
    "map_file",
    "no_memory",
    "read_file",
    "read_head",
    "read_piece",
    "read_segments",
    "remove_tree",
    "rename",
    "rename_durable",
    "replace_durable",
    "require_no_link",
    "round_up",
    "sha256_file",
    "share_file",
    "sync_dir",
    "sync_file",
    "sync_names",
    "unlink",
    "use_ops",
    "verify_file",
    "write_durable",
    "write_shard",
]

#: Imported when they are first used: with them comes numpy, which looking at a run has no use for.
_LATER = {
    "ForwardReader": "_read_ahead",
    "Segment": "_read",
    "map_file": "_verify",
    "read_piece": "_read",
    "read_segments": "_read",
    "sha256_file": "_verify",
    "verify_file": "_verify",
}

__getattr__ = imported_later(__name__, _LATER)
