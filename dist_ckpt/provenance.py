r"""Signatures of resume points: Ed25519 over the bytes of ``resume_point.json``. Layer 1, pure.

A digest shows that bytes changed, a signature who vouches for them. ``resume_point.sig`` beside the
resume point is the plain signature, 64 bytes, so that other tools can check it:

    openssl pkeyutl -verify -pubin -inkey run.pub -rawin \
        -in resume_point.json -sigfile resume_point.sig

What it covers beyond that file it covers by the SHA-256 of each other file that stands there; the
xxh3 digests find accidents and stop nobody. The package `cryptography` does the work, and is needed
only where something is signed or required to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dist_ckpt.errors import SettingError, SignatureError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["SIGNATURE_BYTES", "SIGNATURE_NAME", "Signer", "TrustedKeys", "parse_public_key"]

SIGNATURE_NAME = "resume_point.sig"
SIGNATURE_BYTES = 64


class Signer:
    """A private key.

    Args:
        pem: A file as ``openssl genpkey -algorithm ed25519`` writes it, without a password.
        path: Where it came from, for messages.

    Raises:
        SettingError: It isn't one, or `cryptography` isn't installed.

    Attributes:
        public: The public key, 32 bytes.
    """

    def __init__(self, pem: bytes, *, path: object) -> None:
        self._key: Ed25519PrivateKey = _load("private", pem, path)
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``. Any thread."""
        return self._key.sign(data)


def parse_public_key(pem: bytes, *, path: object) -> bytes:
    """Return the 32 bytes of a public key, as ``openssl pkey -pubout`` writes it.

    Raises:
        SettingError: It isn't one, or `cryptography` isn't installed.
    """
    raw: bytes = _load("public", pem, path).public_bytes_raw()
    return raw


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Public keys any of which may vouch for a resume point, 32 bytes each."""

    keys: Sequence[bytes]

    def check(self, data: bytes, signature: bytes, *, path: object) -> None:
        """Return if one of the keys has signed these very bytes.

        Raises:
            SignatureError: None has.
        """
        _, ed25519 = _cryptography()
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra

        for key in self.keys:
            try:
                ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
            except InvalidSignature:
                continue
            return
        raise SignatureError(
            f"{path} isn't signed by {'the key' if len(self.keys) == 1 else 'any of the keys'} "
            "that is trusted: it was changed, or somebody else wrote it.",
            next_step="Use another generation; `dist-ckpt verify RUN --key KEY` names the signed.",
            path=str(path),
        )


def _load(kind: str, pem: bytes, path: object) -> Any:
    serialization, ed25519 = _cryptography()
    is_private = kind == "private"
    wanted = ed25519.Ed25519PrivateKey if is_private else ed25519.Ed25519PublicKey
    try:
        if is_private:
            key = serialization.load_pem_private_key(pem, password=None)
        else:
            key = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError) as error:  # TypeError: it has a password
        raise _no_key(kind, path, str(error)) from error
    if not isinstance(key, wanted):
        raise _no_key(kind, path, "it is of another algorithm")
    return key


def _no_key(kind: str, path: object, why: str) -> SettingError:
    make = {
        "private": "openssl genpkey -algorithm ed25519 -out run.key",
        "public": "openssl pkey -in run.key -pubout -out run.pub",
    }
    return SettingError(
        f"{path} isn't a {kind} Ed25519 key in a PEM file without a password ({why}).",
        next_step=f"Make one: {make[kind]}",
        path=str(path),
    )


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError as error:
        raise SettingError(
            "Signatures need the package cryptography, which isn't installed.",
            next_step="pip install 'dist-ckpt[sign]'",
            setting="sign_with",
        ) from error
    return serialization, ed25519
