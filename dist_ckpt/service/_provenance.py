"""Who signs this run's resume points, and who may have signed those that it resumes. Layer 6."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.comm import Comm
from dist_ckpt.errors import SettingError
from dist_ckpt.provenance import Signer, TrustedKeys, parse_public_key
from dist_ckpt.service._settings import IMPORT_VARIABLE, Settings

__all__ = ["Provenance", "open_provenance"]

_KEY_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True)
class Provenance:
    """What an attempt signs and requires, the same on every rank but for the key.

    Attributes:
        is_signed: Resume points get a signature, and the SHA-256 of every file.
        sign: Returns the signature of bytes; rank 0's alone, which writes it.
        trusted: Whose resume points are used; None: everybody's.
    """

    is_signed: bool = False
    sign: Callable[[bytes], bytes] | None = None
    trusted: TrustedKeys | None = None


def open_provenance(settings: Settings, comm: Comm) -> Provenance:
    """Return what is signed and required; the key files are read by rank 0 alone. Collective.

    Raises:
        SettingError: A key that is none, a run that could not resume what it saves itself, or a
            .bin that is to be imported: it carries no signature.
        NotFoundError: No such key file.
    """
    own = comm.together("reading the keys", lambda: _read(settings) if comm.rank == 0 else None)
    facts = None
    if own is not None:
        keys = None if own.trusted is None else [key.hex() for key in own.trusted.keys]
        facts = json.dumps([own.is_signed, keys]).encode()
    is_signed, told = json.loads(comm.broadcast(facts))
    trusted = None if told is None else TrustedKeys([bytes.fromhex(key) for key in told])
    return Provenance(is_signed, own.sign if own is not None else None, trusted)


def _read(settings: Settings) -> Provenance:
    signer = None
    if settings.signing_key is not None:
        signer = Signer(_bytes_of(settings.signing_key), path=settings.signing_key)
    required = settings.required_keys
    if required is None:
        return Provenance(signer is not None, signer.sign if signer else None)
    keys = [parse_public_key(_bytes_of(path), path=path) for path in required]
    if signer is None or (keys and signer.public not in keys):
        raise SettingError(
            "Signatures are required, but what this run saves would not have one of them: "
            f"sign_with is {'missing' if signer is None else 'another key'}.",
            next_step="Give sign_with= the private key of one of the keys in require_signature=.",
            setting="require_signature",
        )
    if settings.import_path is not None:
        raise SettingError(
            f"{settings.import_path} is to be imported, but signatures are required: a .bin has "
            "none.",
            next_step="Check where it comes from yourself, and import it in a start without "
            "require_signature: the resume point that it becomes is signed.",
            setting=IMPORT_VARIABLE,
        )
    return Provenance(True, signer.sign, TrustedKeys(_unique([*keys, signer.public])))


def _unique(keys: Iterable[bytes]) -> list[bytes]:
    return list(dict.fromkeys(keys))


def _bytes_of(path: Path) -> bytes:
    # Where secrets are mounted, their names are links.
    return storage.read_file(Path(os.path.realpath(path)), limit_bytes=_KEY_LIMIT_BYTES)
