"""What a signature vouches for: the resume point, and by SHA-256 every other file. Layer 4."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, DigestMismatchError, NotFoundError, SignatureError
from dist_ckpt.provenance import SIGNATURE_BYTES, SIGNATURE_NAME, TrustedKeys
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME, ResumePoint

__all__ = ["check_sums", "require_signature"]

_WAY_OUT = "Use another generation; `dist-ckpt verify RUN --key KEY` names those that are signed."


def require_signature(directory: Path, data: bytes, trusted: TrustedKeys) -> None:
    """Return if a trusted key has signed ``data``, the bytes of the directory's resume point.

    Raises:
        SignatureError: None has, or there is no signature.
    """
    path = directory / SIGNATURE_NAME
    try:
        signature = storage.read_file(path, limit_bytes=SIGNATURE_BYTES)
    except NotFoundError as error:
        raise SignatureError(
            f"{directory} isn't signed, and a signature is required.",
            next_step=_WAY_OUT,
            path=str(path),
        ) from error
    except CorruptFileError as error:
        raise SignatureError(
            f"{path} is no signature: {error.message}", next_step=_WAY_OUT, path=str(path)
        ) from error
    trusted.check(data, signature, path=directory / RESUME_POINT_NAME)


def check_sums(directory: Path, point: ResumePoint, names: Collection[str]) -> None:
    """Return if the index and these files have the SHA-256 that the resume point says.

    Raises:
        SignatureError: It says none: its signature vouches for no other file.
        DigestMismatchError: A file has another one.
    """
    _check(directory / INDEX_NAME, point.index)
    for name in names:
        _check(directory / name, point.files[name])


def _check(path: Path, record: Mapping[str, Any]) -> None:
    expected = record.get("sha256")
    if not isinstance(expected, str):
        raise SignatureError(
            f"The signed resume point doesn't say the SHA-256 of {path}.",
            next_step=_WAY_OUT,
            path=str(path),
        )
    found = storage.sha256_file(path)
    if found != expected:
        raise DigestMismatchError(
            f"{path} isn't the file that was signed: its SHA-256 is {found}, not {expected}.",
            next_step=_WAY_OUT,
            path=str(path),
            expected=expected,
            found=found,
        )
