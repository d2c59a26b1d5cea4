"""Choose the newest usable generation and restore it, on all ranks. Layer 5."""

from dist_ckpt.resume._bins import advise_import, find_bin
from dist_ckpt.resume._choose import restore_newest
from dist_ckpt.resume._derive import derived_states
from dist_ckpt.resume._import import Imported, import_bin
from dist_ckpt.resume._read import Reader
from dist_ckpt.resume._restore import Elsewhere, Resumed, Skipped
from dist_ckpt.resume._values import check_values, inherit

__all__ = [
    "Elsewhere",
    "Imported",
    "Reader",
    "Resumed",
    "Skipped",
    "advise_import",
    "check_values",
    "derived_states",
    "find_bin",
    "import_bin",
    "inherit",
    "restore_newest",
]
