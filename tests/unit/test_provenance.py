"""Resume points that are signed, and required to be: a changed or foreign one isn't even parsed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dist_ckpt.comm import SoloComm
from dist_ckpt.errors import (
    DigestMismatchError,
    NoUsableGenerationError,
    SettingError,
    SignatureError,
)
from dist_ckpt.generations import GenerationStore
from dist_ckpt.history import read_journal
from dist_ckpt.provenance import SIGNATURE_NAME, Signer, TrustedKeys, parse_public_key
from dist_ckpt.resume_point import INDEX_NAME, RESUME_POINT_NAME
from dist_ckpt.seeding import kept_generators
from dist_ckpt.service._provenance import open_provenance
from dist_ckpt.service._settings import Settings
from helpers.hostile import (
    NEWER,
    OLDER,
    SHARD,
    cut,
    encode_other,
    flipped,
    sealed,
    victim,
)
from helpers.reliability import record_fault
from helpers.run_dirs import call, options_of
from helpers.signing import Signed, key_pair, sign
from helpers.trainers import train


@pytest.fixture(autouse=True)
def _kept() -> Iterator[None]:
    with kept_generators():
        yield


def test_a_signed_generation_is_resumed_and_found_whole(tmp_path: Path) -> None:
    signed = Signed(tmp_path)
    assert (signed.resume(), signed.verify()) == ((NEWER, []), [])


def test_a_changed_resume_point_is_refused_before_a_byte_of_it_is_parsed(tmp_path: Path) -> None:
    """Every digest in it is right, or it isn't even JSON: the signature is what is looked at."""
    signed = Signed(tmp_path)
    path = signed.run.home / RESUME_POINT_NAME
    for data in (
        encode_other(signed.run.store.manifest(NEWER), run="another"),
        b'{"a":' * 1000,
        b"",
    ):
        path.write_bytes(data)
        assert signed.resume() == (OLDER, ["signature"])
        assert signed.verify() == ["signature"]
    what = "a signed resume point changed, its digests right or not"
    record_fault("Bad bytes", what, 3, "not parsed, the older point is resumed")


def test_a_fault_anywhere_in_a_signature_is_found(tmp_path: Path) -> None:
    """Case 1: bad bytes, so the older generation is gone on from."""
    signed = Signed(tmp_path)
    path = signed.run.home / SIGNATURE_NAME
    data = signed.store.manifest_bytes(NEWER)
    for bit in range(8 * 64):
        signature = bytearray(path.read_bytes())
        signature[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SignatureError):
            signed.trusted.check(data, bytes(signature), path="x")
    for size in (0, 1, 63):
        with cut(path, size), pytest.raises(SignatureError):
            signed.store.manifest(NEWER)
    with flipped(path, 77):
        assert signed.resume() == (OLDER, ["signature"])
    path.write_bytes(path.read_bytes() + b"\0")
    assert signed.resume() == (OLDER, ["signature"])
    what = "every bit of a signature, and lengths"
    record_fault("Bad bytes", what, 8 * 64 + 4, "refused by name")


def test_a_generation_without_a_signature_is_passed_over(tmp_path: Path) -> None:
    signed = Signed(tmp_path)
    (signed.run.home / SIGNATURE_NAME).unlink()
    assert (signed.resume(), signed.verify()) == ((OLDER, ["signature"]), ["signature"])
    (signed.run.store.path(OLDER) / SIGNATURE_NAME).unlink()
    with pytest.raises(NoUsableGenerationError, match="isn't signed"):
        signed.resume()


def test_another_key_vouches_for_nothing_and_one_of_several_is_enough(tmp_path: Path) -> None:
    signed = Signed(tmp_path)
    other = Signer(key_pair(tmp_path, "other")[0].read_bytes(), path="other").public
    own, signed.trusted = signed.trusted, TrustedKeys([other])
    with pytest.raises(NoUsableGenerationError, match="isn't signed by the key"):
        signed.resume()
    signed.trusted = TrustedKeys([other, *own.keys])
    assert signed.resume() == (NEWER, [])


def test_a_file_that_fits_its_fast_digest_but_was_not_signed_is_refused(tmp_path: Path) -> None:
    """The fast digests can be forged on purpose; here the forger's work is done by a stand-in."""
    signed = Signed(tmp_path)
    path = signed.run.home / SHARD
    with flipped(path, 8 * 20):
        point = signed.store.manifest(NEWER)
        with pytest.raises(DigestMismatchError, match="isn't the file that was signed"):
            signed.store.check_sums(point)
        assert signed.resume() == (OLDER, ["digest-mismatch"])
    with flipped(signed.run.home / INDEX_NAME, 8 * 20), pytest.raises(DigestMismatchError):
        signed.store.check_sums(point, [])
    what = "a signed file changed and its fast digest forged"
    record_fault("Bad bytes", what, 2, "refused by name, the older point is resumed")


def test_a_signature_that_vouches_for_no_file_is_refused(tmp_path: Path) -> None:
    signed = Signed(tmp_path)
    data = encode_other(signed.run.store.manifest(NEWER))
    body = json.loads(data)
    del body["files"][SHARD]["sha256"]
    data = sealed(body)
    signer = Signer(signed.private.read_bytes(), path="x")
    (signed.run.home / RESUME_POINT_NAME).write_bytes(data)
    (signed.run.home / SIGNATURE_NAME).write_bytes(signer.sign(data))
    assert signed.resume() == (OLDER, ["signature"])


def test_openssl_makes_the_keys_and_checks_the_signature(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    private, public = tmp_path / "run.key", tmp_path / "run.pub"
    subprocess.run([openssl, "genpkey", "-algorithm", "ed25519", "-out", private], check=True)
    subprocess.run([openssl, "pkey", "-in", private, "-pubout", "-out", public], check=True)
    signer = Signer(private.read_bytes(), path=private)
    assert parse_public_key(public.read_bytes(), path=public) == signer.public
    signed = victim(tmp_path / "run")
    sign(signed.home, signer)
    files = ["-in", RESUME_POINT_NAME, "-sigfile", SIGNATURE_NAME]
    done = subprocess.run(
        [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", *files],
        cwd=signed.home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "Verified" in done.stdout) == (0, True), done.stderr


# Settings


def test_a_run_that_could_not_resume_what_it_saves_is_refused(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    _, other = key_pair(tmp_path, "other")
    assert open_provenance(Settings(), SoloComm()).trusted is None
    ready = open_provenance(
        Settings(sign_with=private, require_signature=[other, public]), SoloComm()
    )
    assert ready.trusted is not None
    assert len(ready.trusted.keys) == 2
    assert not open_provenance(Settings(sign_with=private), SoloComm()).trusted
    for settings, text in (
        (Settings(require_signature=True), "sign_with is missing"),
        (Settings(sign_with=private, require_signature=other), "sign_with is another key"),
        (Settings(sign_with=public), "isn't a private Ed25519 key"),
        (Settings(sign_with=private, require_signature=private), "isn't a public Ed25519 key"),
    ):
        with pytest.raises(SettingError, match=text):
            open_provenance(settings, SoloComm())
    with pytest.raises(SettingError, match="require_signature"):
        Settings(require_signature=[])


def test_keys_of_another_algorithm_or_with_a_password_are_refused(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    for encryption in (
        serialization.NoEncryption(),
        serialization.BestAvailableEncryption(b"secret"),
    ):
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
        with pytest.raises(SettingError, match="isn't a private Ed25519 key"):
            Signer(pem, path="x")


def test_the_environment_signs_and_requires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = key_pair(tmp_path)
    monkeypatch.setenv("DIST_CKPT_SIGN_WITH", str(private))
    for text in ("1", str(public), os.pathsep.join([str(public), str(public)])):
        monkeypatch.setenv("DIST_CKPT_REQUIRE_SIGNATURE", text)
        found = open_provenance(Settings(), SoloComm())
        assert found.is_signed
        assert found.trusted is not None
        assert len(found.trusted.keys) == 1
    monkeypatch.setenv("DIST_CKPT_IMPORT", str(tmp_path / "x.bin"))
    with pytest.raises(SettingError, match=r"a \.bin has none"):
        open_provenance(Settings(), SoloComm())


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(SettingError, match=r"dist-ckpt\[sign\]"):
        Signer(b"", path="x")


# A training


def test_two_ranks_sign_what_they_save_and_pass_over_what_others_did(tmp_path: Path) -> None:
    private, public = key_pair(tmp_path)
    settings = {"sign_with": str(private), "require_signature": str(public)}
    run_dir = tmp_path / "small"
    train(options_of(run_dir, settings=settings), ranks=2)
    store = GenerationStore(run_dir)
    assert store.steps()[-1] == 12
    assert call("verify", run_dir, "--key", public).status == 0
    _, other = key_pair(tmp_path, "other")
    called = call("verify", run_dir, "--json", "--key", other)
    assert (called.status, {fault["id"] for fault in called.json["faults"]}) == (1, {"signature"})
    assert call("verify", run_dir, "--key", other, "--key", public).status == 0
    bin_path = store.bin_path(12)
    assert call("verify", bin_path, "--key", public).status == 0
    alone = tmp_path / bin_path.name
    shutil.copyfile(bin_path, alone)
    assert call("verify", alone, "--key", public).status == 1
    fork = tmp_path / "branch"
    assert call("fork", f"{run_dir}@12", fork).status == 0
    assert call("verify", fork, "--key", public).status == 0
    # Somebody puts a generation there that no digest speaks against.
    home = store.path(12)
    point = store.manifest(12)
    (home / RESUME_POINT_NAME).unlink()
    (home / RESUME_POINT_NAME).write_bytes(encode_other(point, notes={}))
    train(options_of(run_dir, settings=settings, until=16), ranks=2)
    events = {event["event"]: event for event in read_journal(run_dir)}
    assert (events["skipped"]["step"], events["skipped"]["id"]) == (12, "signature")
    assert (events["resumed"]["step"], store.steps()[-1]) == (8, 16)
    assert call("verify", run_dir, "--key", public).status == 0
