"""Canonical files of generations. Layer 5, not collective."""

from dist_ckpt.export._assemble import canonical_pieces
from dist_ckpt.export._bin import (
    export_bin,
    read_bin,
    read_header,
    write_bin,
    write_whole,
)
from dist_ckpt.export._put import put_whole
from dist_ckpt.export._sum import check_sum, read_sum, write_sum

__all__ = [
    "canonical_pieces",
    "check_sum",
    "export_bin",
    "put_whole",
    "read_bin",
    "read_header",
    "read_sum",
    "write_bin",
    "write_sum",
    "write_whole",
]
