"""Runs whose resume points are signed, by keys made for the test."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from dist_ckpt.comm import SoloComm
from dist_ckpt.generations import GenerationStore
from dist_ckpt.provenance import SIGNATURE_NAME, Signer, TrustedKeys
from dist_ckpt.resume import restore_newest
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME
from dist_ckpt.runs import Depth, check_generation
from helpers.hostile import NEWER, OLDER, Small, Victim, sealed, victim


def key_pair(folder: Path, name: str = "run") -> tuple[Path, Path]:
    """Return the files of a private and a public key."""
    key = ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def sign(home: Path, signer: Signer) -> None:
    """Have the SHA-256 of every file in a resume point, and its signature beside it."""
    body = json.loads((home / RESUME_POINT_NAME).read_bytes())
    for name, record in {**body["files"], INDEX_NAME: body["index"]}.items():
        record["sha256"] = hashlib.sha256((home / name).read_bytes()).hexdigest()
    data = sealed(body)
    (home / RESUME_POINT_NAME).write_bytes(data)
    (home / SIGNATURE_NAME).write_bytes(signer.sign(data))


class Signed:
    """A run of two signed generations, of which only signed ones are wanted."""

    def __init__(self, folder: Path) -> None:
        self.run: Victim = victim(folder / "run")
        self.private, self.public = key_pair(folder)
        signer = Signer(self.private.read_bytes(), path=self.private)
        self.trusted = TrustedKeys([signer.public])
        for step in (OLDER, NEWER):
            sign(self.run.store.path(step), signer)

    @property
    def store(self) -> GenerationStore:
        store = self.run.store
        store.trusted = self.trusted
        return store

    def resume(self) -> tuple[int, list[str]]:
        """Return the step that is resumed, and the ids of why later ones were passed over."""
        small = Small()
        resumed = restore_newest(self.store, SoloComm(), small.captured, admit=lambda _point: None)
        assert resumed is not None
        return resumed.step, [skipped.id for skipped in resumed.skipped]

    def verify(self) -> list[str]:
        """Return the ids of the faults in the newer generation."""
        return [fault.id for fault in check_generation(self.store, NEWER, Depth()).faults]
