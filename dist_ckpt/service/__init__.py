"""``Checkpointer`` and what it is made of. Layer 6."""

from dist_ckpt.service._checkpointer import Checkpointer

__all__ = ["Checkpointer"]
