"""Choose the newest usable generation and restore it, on all ranks. Layer 5."""

from dist_ckpt.resume._bins import advise_import
from dist_ckpt.resume._choose import Resumed, Skipped, restore_newest
from dist_ckpt.resume._derive import derived_states
from dist_ckpt.resume._import import Imported, import_bin
from dist_ckpt.resume._read import Reader

__all__ = [
    "Imported",
    "Reader",
    "Resumed",
    "Skipped",
    "advise_import",
    "derived_states",
    "import_bin",
    "restore_newest",
]
