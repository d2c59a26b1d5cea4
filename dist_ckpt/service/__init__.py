"""``Checkpointer`` and what it is made of. Layer 6."""

from dist_ckpt.service._checkpointer import RUN_DIR_VARIABLE, Checkpointer
from dist_ckpt.service._settings import (
    IMPORT_VARIABLE,
    OMIT_VARIABLE,
    STOP_AT_VARIABLE,
    WITNESS_VARIABLE,
)
from dist_ckpt.service._witness import witness_file

__all__ = [
    "IMPORT_VARIABLE",
    "OMIT_VARIABLE",
    "RUN_DIR_VARIABLE",
    "STOP_AT_VARIABLE",
    "WITNESS_VARIABLE",
    "Checkpointer",
    "witness_file",
]
