"""The resume protocol on anyone's training: continuous, cut, resumed, and negatives. Layer 7.

Scenarios run in fresh processes, one after the other. What is compared is what the library saw
inside them (`dist_ckpt.service`'s witness) and the generations that they left, never what a script
prints.
"""

from __future__ import annotations

from dist_ckpt.proof._command import resolve_command
from dist_ckpt.proof._launch import Launch, Order
from dist_ckpt.proof._prove import DEFAULT_TIMEOUT_SECS, DEFAULT_UNTIL, Plan, Proof, run_proof
from dist_ckpt.proof._report import describe, write_report

__all__ = [
    "DEFAULT_TIMEOUT_SECS",
    "DEFAULT_UNTIL",
    "Launch",
    "Order",
    "Plan",
    "Proof",
    "describe",
    "resolve_command",
    "run_proof",
    "write_report",
]
