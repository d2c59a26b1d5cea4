"""A resume point that leaves the machine: copied, read back, loaded from there, confirmed. Layer 7.

The shipped folder is a run directory of its own, so that training goes on in it or in a copy of it.
Whatever stops a shipment, the same call goes on with it. Importing this imports no torch; a
destination behind a URL needs fsspec.
"""

from __future__ import annotations

from dist_ckpt.shipping._place import Place, parse_place
from dist_ckpt.shipping._ship import Plan, Shipped, plan_shipment, ship, work_bytes
from dist_ckpt.shipping._source import is_shipments_pin

__all__ = [
    "Place",
    "Plan",
    "Shipped",
    "is_shipments_pin",
    "parse_place",
    "plan_shipment",
    "ship",
    "work_bytes",
]
