"""Bytes ↔ ``step_NNNNNN.bin``, the canonical single file. Pure: layer 1, numpy, no torch, no I/O.

The whole format (requirements A2 to A4), little-endian, nothing before, between or after::

    int32    step
    int32    n_params
    float32  weights[n_params]
    float32  m[n_params]          first Adam moment
    float32  v[n_params]          second Adam moment

A file is exactly ``8 + 12 · n_params`` bytes. Its header is trusted, never its name.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import CorruptFileError, SettingError
from dist_ckpt.slices import ByteRange

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    Float32Array = NDArray[np.float32]

__all__ = [
    "HEADER_BYTES",
    "MAX_PARAMS",
    "MAX_STEP",
    "CanonicalState",
    "bin_name",
    "bin_size",
    "encode_header",
    "encode_pieces",
    "parse_header",
    "parse_state",
    "parse_step_name",
    "regions",
    "step_name",
]

HEADER_BYTES: Final = 8
MAX_PARAMS: Final = 2**31 - 1  # n_params is an int32
MAX_STEP: Final = 2**31 - 1  # likewise
_PARAM_BYTES: Final = 12  # weight, m and v of one parameter, float32 each
_FLOAT_BYTES: Final = 4
_HEADER: Final = struct.Struct("<ii")
_DTYPE: Final = "<f4"
_STEP_NAME: Final = re.compile(r"(step_([0-9]{6,}))(?:\.bin)?")


@dataclass(frozen=True, slots=True, eq=False)
class CanonicalState:
    """What one ``step_N.bin`` holds; the arrays may be read-only views of a mapped file.

    Attributes:
        step: Number of finished optimizer updates.
        weights: All parameters, flat, in the model's own order, float32 little-endian.
        m: First Adam moment, same order and length.
        v: Second Adam moment, same order and length.

    Raises:
        SettingError: An array isn't 1-D float32, lengths differ, or a number doesn't fit int32.
    """

    step: int
    weights: Float32Array
    m: Float32Array
    v: Float32Array

    def __post_init__(self) -> None:
        _check_step(self.step)
        _check_num_params(self.weights.size)
        for name, array in (("weights", self.weights), ("m", self.m), ("v", self.v)):
            found = (array.dtype.str, array.shape)
            expected = (_DTYPE, (self.weights.size,))
            if found != expected:
                message = (
                    f"{name} is {found[0]} of shape {found[1]}, "
                    f"a canonical state needs {expected[0]} of shape {expected[1]}."
                )
                raise SettingError(
                    message,
                    next_step="Flatten it, widen it to float32, and give all three one length.",
                    expected=expected,
                    found=found,
                )

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return self.weights.size


def bin_size(n_params: int) -> int:
    """Return the exact size in bytes of a file of ``n_params`` parameters: ``8 + 12 · n_params``.

    Raises:
        SettingError: ``n_params`` is negative or doesn't fit int32.
    """
    _check_num_params(n_params)
    return HEADER_BYTES + _PARAM_BYTES * n_params


def encode_header(step: int, n_params: int) -> bytes:
    """Return the 8 bytes that begin a file.

    Raises:
        SettingError: ``step`` or ``n_params`` is negative or doesn't fit int32.
    """
    _check_step(step)
    _check_num_params(n_params)
    return _HEADER.pack(step, n_params)


def parse_header(
    data: bytes | memoryview, *, file_size: int, path: str | os.PathLike[str]
) -> tuple[int, int]:
    """Return ``(step, n_params)`` of a file whose header and size agree.

    Nothing is allocated: a header that asks for gigabytes costs nothing.

    Args:
        data: The first 8 bytes of the file, or more.
        file_size: Size of the whole file in bytes.
        path: Named in errors; never opened.

    Raises:
        CorruptFileError: The header is short, a number is negative, or the size isn't
            ``8 + 12 · n_params``; carries ``path``, ``expected`` and ``found``.
    """
    if len(data) < HEADER_BYTES or file_size < HEADER_BYTES:
        found = min(len(data), file_size)
        message = f"{path}: the header has {found} bytes, a .bin begins with {HEADER_BYTES}."
        raise _corrupt(message, path=path, expected=HEADER_BYTES, found=found)
    step, n_params = _HEADER.unpack_from(data)
    if step < 0:
        message = f"{path}: the header says step {step}, a step is never negative."
        raise _corrupt(message, path=path, expected="step >= 0", found=step)
    if n_params < 0:
        message = f"{path}: the header says {n_params} parameters, a count is never negative."
        raise _corrupt(message, path=path, expected="n_params >= 0", found=n_params)
    expected = bin_size(n_params)
    if file_size != expected:
        message = (
            f"{path}: the file has {file_size} bytes, its header of {n_params} parameters "
            f"calls for {expected}."
        )
        raise _corrupt(message, path=path, expected=expected, found=file_size)
    return step, n_params


def regions(n_params: int) -> tuple[ByteRange, ByteRange, ByteRange]:
    """Return where weights, m and v lie in a file of ``n_params`` parameters.

    Raises:
        SettingError: ``n_params`` is negative or doesn't fit int32.
    """
    _check_num_params(n_params)
    size = _FLOAT_BYTES * n_params
    starts = (HEADER_BYTES, HEADER_BYTES + size, HEADER_BYTES + 2 * size)
    weights, m, v = (ByteRange(start, start + size) for start in starts)
    return weights, m, v


def parse_state(
    data: bytes | memoryview | NDArray[np.uint8], *, path: str | os.PathLike[str]
) -> CanonicalState:
    """Return the state in ``data``, as views: nothing is copied, so a mapped file stays on disk.

    Args:
        data: All bytes of the file, for example a memory map of it.
        path: Named in errors; never opened.

    Raises:
        CorruptFileError: As `parse_header`.
    """
    import numpy as np  # noqa: PLC0415 - looking at a run mustn't cost its import

    view = memoryview(data)  # type: ignore[arg-type] # an array has a buffer, typed or not
    step, n_params = parse_header(view[:HEADER_BYTES], file_size=len(view), path=path)
    weights, m, v = (
        np.frombuffer(view, dtype=_DTYPE, count=n_params, offset=region.start)
        for region in regions(n_params)
    )
    return CanonicalState(step, weights, m, v)


def encode_pieces(state: CanonicalState, *, piece_bytes: int = 16 * 2**20) -> Iterator[memoryview]:
    """Yield the bytes of a file in order: the header, then pieces of weights, m and v.

    Pieces are views of the state's arrays (copied only where an array isn't contiguous) of
    ``piece_bytes`` at most, so writing a state costs no second copy of it.
    """
    import numpy as np  # noqa: PLC0415 - looking at a run mustn't cost its import

    yield memoryview(encode_header(state.step, state.num_params))
    for array in (state.weights, state.m, state.v):
        if array.size == 0:  # an empty memoryview can't be cast
            continue
        view = np.ascontiguousarray(array).data.cast("B")
        for start in range(0, len(view), piece_bytes):
            yield view[start : start + piece_bytes]


def step_name(step: int) -> str:
    """Return the name of a step's generation: ``step_000100``, six digits at least.

    Raises:
        SettingError: ``step`` is negative.
    """
    if step < 0:
        message = f"Step {step} is negative, a step counts finished updates."
        raise SettingError(message, expected="step >= 0", found=step)
    return f"step_{step:06d}"


def bin_name(step: int) -> str:
    """Return the name of a step's canonical file: ``step_000100.bin``, six digits at least.

    Raises:
        SettingError: ``step`` is negative.
    """
    return f"{step_name(step)}.bin"


def parse_step_name(name: str) -> int | None:
    """Return the step in ``step_000100`` or ``step_000100.bin``, None for any other name.

    Strict: exactly what `step_name` and `bin_name` produce, so no two names mean one step.
    """
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match[2])
    return step if match[1] == step_name(step) else None


def _check_step(step: int) -> None:
    if not 0 <= step <= MAX_STEP:
        message = f"Step {step} doesn't fit the .bin's int32 (0 … {MAX_STEP})."
        raise SettingError(
            message,
            next_step="Keep the sharded generation; it has no such limit.",
            expected=MAX_STEP,
            found=step,
        )


def _check_num_params(n_params: int) -> None:
    if not 0 <= n_params <= MAX_PARAMS:
        message = f"{n_params} parameters don't fit the .bin's int32 (0 … {MAX_PARAMS})."
        raise SettingError(
            message,
            next_step="Keep the sharded generation; it has no such limit.",
            expected=MAX_PARAMS,
            found=n_params,
        )


def _corrupt(
    message: str, *, path: str | os.PathLike[str], expected: object, found: object
) -> CorruptFileError:
    return CorruptFileError(
        message,
        next_step="Use another step's file, or export this one again from its generation.",
        path=path,
        expected=expected,
        found=found,
    )
