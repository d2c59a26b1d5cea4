"""What is there of a run's generations: list, read, check. Layer 4, reads only, not collective."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.canonical import (
    HEADER_BYTES,
    bin_name,
    parse_header,
    parse_step_name,
    step_name,
)
from dist_ckpt.errors import (
    CorruptFileError,
    DigestMismatchError,
    DistCkptError,
    ForeignFileError,
    NotFoundError,
    StorageError,
)
from dist_ckpt.generations._known import KnownGenerations
from dist_ckpt.generations._pins import PINS_LIMIT_BYTES, PINS_NAME, Pins, parse_pins
from dist_ckpt.generations._signed import check_sums, require_signature
from dist_ckpt.provenance import TrustedKeys
from dist_ckpt.resume_point import (
    INDEX_NAME,
    RESUME_POINT_NAME,
    VERIFIED_NAME,
    ResumePoint,
    load_strict_json,
    parse_resume_point,
    shard_name,
)
from dist_ckpt.snapshot_index import IndexedTensor, parse_index
from dist_ckpt.storage import FileDigest

__all__ = ["MANIFEST_LIMIT_BYTES", "StoredGenerations"]

#: Nobody's manifest is larger; a larger file isn't read into memory.
MANIFEST_LIMIT_BYTES = 1 << 30
_WAY_OUT = "Use another generation; `dist-ckpt verify RUN` names the whole ones."


class StoredGenerations:
    """The generations below one run directory, to be read; any rank, any thread.

    Args:
        run_dir: The run directory; needn't exist for reading to answer "none".

    Attributes:
        trusted: Who must have signed a resume point; None: anybody may have written it.
        known: What was read of each generation before.
    """

    def __init__(self, run_dir: Path) -> None:
        self.trusted: TrustedKeys | None = None
        self.run_dir = run_dir
        self.directory = run_dir / "checkpoints"
        self.archive = run_dir / "archive"
        self.known = KnownGenerations(
            self.path, self.manifest, lambda step: self.verified_at(step, strict=True)
        )

    # Reading

    def steps(self) -> list[int]:
        """Return the steps of the committed generations, as numbers, ascending."""
        if not storage.exists(self.directory):
            return []
        names = [name for name in storage.list_names(self.directory) if not name.endswith(".bin")]
        found = (parse_step_name(name) for name in names)
        return sorted(step for step in found if step is not None)

    def path(self, step: int) -> Path:
        """Return where the generation of ``step`` lies or would lie."""
        return self.directory / step_name(step)

    def has(self, step: int) -> bool:
        """Return whether the name of a generation of ``step`` is there."""
        return storage.exists(self.path(step))

    def bin_path(self, step: int) -> Path:
        """Return where ``step_N.bin`` of ``step`` lies or would lie."""
        return self.run_dir / bin_name(step)

    def manifest_bytes(self, step: int, *, from_device: bool = False) -> bytes:
        """Return the bytes of ``resume_point.json``, unchecked.

        Raises:
            ForeignFileError: A symbolic link has the generation's name: what is verified, marked
                and retired is in the run directory and nowhere else.
        """
        path = self.path(step)
        self._require_own(path)
        # Joined as text: pathlib's joining would be much of the time of a list of thousands.
        file = f"{path}/{RESUME_POINT_NAME}"
        return storage.read_file(file, limit_bytes=MANIFEST_LIMIT_BYTES, from_device=from_device)

    def _require_own(self, path: Path) -> None:
        if stat.S_ISLNK(storage.lstat(path).st_mode):
            raise ForeignFileError(
                f"{path} is a symbolic link, and no generation.",
                next_step="Remove the link; copy the generation here if it is wanted.",
                path=str(path),
            )

    def manifest(self, step: int, *, from_device: bool = False) -> ResumePoint:
        """Return the checked resume point of ``step``.

        Args:
            step: Which.
            from_device: Read past the page cache: what the disk will give after a power cut.

        Raises:
            NotFoundError: No such generation, or it lacks the file.
            SignatureError: None of the trusted keys has signed it; not a byte was parsed then.
            CorruptFileError: The file isn't whole, or belongs to another step.
        """
        path = self.path(step) / RESUME_POINT_NAME
        data = self.manifest_bytes(step, from_device=from_device)
        if self.trusted is not None:
            require_signature(path.parent, data, self.trusted)
        point = parse_resume_point(data, path=path)
        if point.step != step:
            raise CorruptFileError(
                f"{path} is of step {point.step}, in the directory of step {step}.",
                next_step="Move the directory out of checkpoints/.",
                path=str(path),
                expected=step,
                found=point.step,
            )
        return point

    def index(self, point: ResumePoint, *, from_device: bool = False) -> dict[str, IndexedTensor]:
        """Return where every tensor of ``point`` lies; the index's digest is checked."""
        path = self.path(point.step) / INDEX_NAME
        data = storage.read_file(path, limit_bytes=MANIFEST_LIMIT_BYTES, from_device=from_device)
        found = storage.digest_bytes(data)
        if found != point.index["digest"]:
            raise DigestMismatchError(
                f"{path} was changed: its digest is {found}, "
                f"the resume point says {point.index['digest']}.",
                next_step=_WAY_OUT,
                path=str(path),
                expected=point.index["digest"],
                found=found,
            )
        sizes = {name: int(record["size_bytes"]) for name, record in point.files.items()}
        return parse_index(data, path=path, file_sizes=sizes)

    def digests(self, point: ResumePoint) -> dict[str, FileDigest]:
        """Return the digest of each rank file of ``point``."""
        where = self.path(point.step) / RESUME_POINT_NAME
        digests = {}
        for name, record in point.files.items():
            try:
                digests[name] = FileDigest.from_json(record)
            except (KeyError, TypeError, ValueError, DistCkptError) as error:
                raise CorruptFileError(
                    f"{where} has no usable digests of {name}: {error}",
                    next_step="Use another generation.",
                    path=str(where),
                ) from error
        return digests

    def check_files(self, point: ResumePoint) -> None:
        """Return if every file of ``point`` is there with its length; reads a header at most.

        Raises:
            NotFoundError: One is missing.
            CorruptFileError: One has another length, or says that it is of another step.
        """
        for name, record in point.files.items():
            path = self.path(point.step) / name
            if not storage.exists(path):
                raise NotFoundError(f"{path} is missing.", next_step=_WAY_OUT, path=str(path))
            size = storage.file_size(path)
            if size != record["size_bytes"]:
                raise CorruptFileError(
                    f"{path} has {size} bytes instead of {record['size_bytes']}.",
                    next_step=_WAY_OUT,
                    path=str(path),
                    expected=record["size_bytes"],
                    found=size,
                )
        self.check_header(point)

    def check_header(self, point: ResumePoint) -> None:
        """Return if a shard that is a canonical file says so of this step and this many parameters.

        Raises:
            CorruptFileError: It is of another one, whatever its digests say.
        """
        if not point.canonical.is_shard:
            return
        path = self.path(point.step) / shard_name(0)
        head, size = storage.read_head(path, HEADER_BYTES)
        expected = (point.step, point.canonical.num_params)
        found = parse_header(head, file_size=size, path=path)
        if found != expected:
            raise CorruptFileError(
                f"{path} begins as the shard of step {found[0]} with {found[1]} parameters, not "
                f"of step {expected[0]} with {expected[1]}.",
                next_step=_WAY_OUT,
                path=str(path),
                expected=list(expected),
                found=list(found),
            )

    def check_sums(self, point: ResumePoint, names: Collection[str] | None = None) -> None:
        """Return if the index and every file have the SHA-256 that the signed resume point says.

        Args:
            point: The resume point, whose signature was checked.
            names: Only these files, and the index; None for all.

        Raises:
            SignatureError: The resume point says none.
            DigestMismatchError: A file has another one.
        """
        check_sums(self.path(point.step), point, point.files if names is None else names)

    def verified_at(self, step: int, *, strict: bool = False) -> float | None:
        """Return when this very generation was read back whole, in seconds since the epoch.

        None where it wasn't, or where ``verified.json`` is of another generation or unreadable;
        with ``strict`` a `StorageError` where the system refuses: that tells nothing of it.
        """
        try:
            data = storage.read_file(self.path(step) / VERIFIED_NAME, limit_bytes=1 << 16)
            body = load_strict_json(data, path=VERIFIED_NAME)
            if body.get("resume_point") != storage.digest_bytes(self.manifest_bytes(step)):
                return None
            when = float(body["time"])
        except (DistCkptError, KeyError, TypeError, ValueError, OverflowError) as error:
            if strict and isinstance(error, StorageError):
                raise
            return None
        return when if math.isfinite(when) else None

    def verify(
        self,
        point: ResumePoint,
        *,
        names: Collection[str] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> int:
        """Return the bytes read after every byte of the files was compared with its digest.

        Args:
            point: The resume point, already checked by itself.
            names: Only these files; None for all, the index among them.
            progress: Called with the bytes read since the last call.

        Raises:
            DigestMismatchError, CorruptFileError, NotFoundError: The first fault found.
        """
        total = 0
        if names is None:
            self.index(point, from_device=True)
        for name, digest in self.digests(point).items():
            if names is None or name in names:
                path = self.path(point.step) / name
                total += storage.verify_file(path, digest, progress=progress)
        return total

    # Pins

    def pins(self) -> Mapping[int, str]:
        """Return step → reason of the pinned generations.

        A pin of a generation that isn't here (any more) doesn't count: another one of its step has
        a pin of its own. One whose manifest can't be read counts as pinned.

        Raises:
            CorruptFileError: ``pins.json`` can't be understood: nobody may guess what was pinned.
        """
        pins = self._read_pins()
        pinned = dict(pins.by_step)
        for id_, (step, reason) in pins.by_id.items():
            if storage.exists(self.path(step)) and self._id_or(step, id_) == id_:
                pinned[step] = reason
        return pinned

    def _read_pins(self) -> Pins:
        path = self.run_dir / PINS_NAME
        if not storage.exists(path):
            return Pins()
        return parse_pins(storage.read_file(path, limit_bytes=PINS_LIMIT_BYTES), path=path)

    def _id_or(self, step: int, otherwise: str) -> str:
        try:
            return self.manifest(step).id
        except DistCkptError:
            return otherwise
