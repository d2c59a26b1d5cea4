"""Type names that the modules of storage share. Layer 2, pure; imported for type checking only."""

from __future__ import annotations

import os
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Path: TypeAlias = str | os.PathLike[str]
Bytes: TypeAlias = bytes | bytearray | memoryview
ByteArray: TypeAlias = NDArray[np.uint8]
AnyArray: TypeAlias = NDArray[Any]
Json: TypeAlias = dict[str, Any]
