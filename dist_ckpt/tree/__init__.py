"""Values of any nesting as plain JSON and back, exact, with nothing executed. Layer 1, pure.

What JSON knows is written as it is. What it doesn't know becomes an object with the single key
``$tag``: tuples, dicts with other keys than plain strings, Counter, bytes, infinities, dtypes, …
Types, their order and the type of each key come back as they were. The tags are a closed list: a
value of any other type is refused with its path, an unknown tag is a corrupt file, and no name in
a file is ever imported or called (dtypes and factories are looked up in tables). The result is for
``json.dumps(…, allow_nan=False)``.

Tensors and arrays go to the caller's ``put_tensor``, or inline (base64) where they are small.
That one list lies in two places keeps its values, not its identity.
"""

from __future__ import annotations

from dist_ckpt.tree._decode import decode_tree
from dist_ckpt.tree._encode import encode_tree
from dist_ckpt.tree._tables import (
    INLINE_LIMIT_BYTES,
    JSON,
    TORCH_DTYPES,
    check_tensor,
    refuse_value,
)

__all__ = [
    "INLINE_LIMIT_BYTES",
    "JSON",
    "TORCH_DTYPES",
    "check_tensor",
    "decode_tree",
    "encode_tree",
    "refuse_value",
]
