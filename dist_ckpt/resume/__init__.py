"""Choose the newest usable generation and restore it, on all ranks. Layer 5."""

from dist_ckpt.resume._choose import Resumed, Skipped, restore_newest
from dist_ckpt.resume._derive import derived_states
from dist_ckpt.resume._read import Reader

__all__ = ["Reader", "Resumed", "Skipped", "derived_states", "restore_newest"]
