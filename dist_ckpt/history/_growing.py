"""What a file has gained since it was read last. Layer 4, reads only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dist_ckpt.errors import NotFoundError
from dist_ckpt.history._array_file import LIMIT_BYTES
from dist_ckpt.storage import lstat, read_file

if TYPE_CHECKING:
    import os

__all__ = ["GrowingFile"]

#: So many bytes before what is new must be what they were.
_OVERLAP_BYTES: Final = 256


class GrowingFile:
    """A file of a history, read from where its reader has got to.

    It is read whole again where another file has its name, where it has become shorter, or where
    the last bytes that were settled have changed. A byte that is changed further in front, in the
    same file, isn't seen: whoever follows for long begins anew now and then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self.begin_anew()

    def begin_anew(self) -> None:
        """Have the next `read` return all bytes."""
        self._file: tuple[int, int] | None = None
        self._settled = 0
        self._overlap = b""

    def read(self) -> tuple[bool, bytes]:
        """Return whether these are all bytes of the file, and them; else those not yet settled.

        Nothing, and all of it, where there is no such file.

        Raises:
            StorageError: The file system refused.
            CorruptFileError: Larger than any file of a history.
        """
        try:
            status = lstat(self._path)
            file = (status.st_dev, status.st_ino)
            is_same = file == self._file and status.st_size >= self._settled
            if is_same and self._settled:
                start = self._settled - len(self._overlap)
                data = read_file(self._path, limit_bytes=LIMIT_BYTES, start=start)
                if data.startswith(self._overlap):
                    return False, data[len(self._overlap) :]
            self.begin_anew()
            data = read_file(self._path, limit_bytes=LIMIT_BYTES)
        except NotFoundError:
            self.begin_anew()
            return True, b""
        self._file = file
        return True, data

    def settle(self, data: bytes, num_bytes: int) -> None:
        """Have so many bytes from the beginning of what `read` has returned not returned again."""
        self._settled += num_bytes
        first = max(0, num_bytes - _OVERLAP_BYTES)
        self._overlap = (self._overlap + data[first:num_bytes])[-_OVERLAP_BYTES:]
