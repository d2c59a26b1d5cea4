"""Where a shipment goes, and how to speak of it without giving credentials away. Pure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote

from dist_ckpt.errors import UsageError

__all__ = ["HIDDEN", "Place", "is_secret_name", "parse_place", "secrets_in"]

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_PORT = re.compile(r"[^@/]*:\d+")
_SECRET_NAME = re.compile(
    r"secret|token|passw|passphrase|pwd|credential|signature|(access|account|api)_?key|^key$|^cred$"
    r"|authorization|cookie",
    re.IGNORECASE,
)
HIDDEN = "***"
#: Shorter ones would be found in words that have nothing to do with them.
_LEAST_CHARACTERS = 3


@dataclass(frozen=True, slots=True)
class Place:
    """A destination.

    Attributes:
        label: For people and files: the URL without user, password and query, or the path.
        path: A directory of this machine; None for a URL.
        url: As it was given; None for a directory. Never to be shown.
        secrets: Parts of it that are never shown.
    """

    label: str
    path: Path | None
    url: str | None = None
    secrets: tuple[str, ...] = ()

    @property
    def scheme(self) -> str:
        """The URL's protocol in lower case; ``"file"`` for a directory."""
        return "file" if self.url is None else self.url.partition("://")[0].lower()

    def scrub(self, text: str, more: Iterable[str] = ()) -> str:
        """Return ``text`` with everything secret blotted out."""
        known = {secret for secret in (*self.secrets, *more) if len(secret) >= _LEAST_CHARACTERS}
        for secret in sorted(known, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return text


def parse_place(text: str) -> Place:
    """Return the place that a user has named: a directory, or a URL.

    Raises:
        UsageError: It is neither.
    """
    if "::" in text and "://" in text:
        raise UsageError(
            "A chain of protocols (::) isn't a destination.", next_step="Give one URL."
        )
    found = _URL.fullmatch(text)
    if found is None:
        if not text:
            raise UsageError(
                "The destination is empty.", next_step="Give a directory, or a URL as s3://bucket."
            )
        path = Path(os.path.abspath(os.path.expanduser(text)))
        return Place(str(path), path)
    scheme, rest = found[1].lower(), found[2]
    if scheme in ("file", "local"):
        path = Path(os.path.abspath(rest))
        return Place(str(path), path)
    userinfo, host_and_path = _split_user(rest)
    shown, query = _split_query(host_and_path)
    if not shown.strip("/"):
        raise UsageError(
            f"{scheme}:// names no place.", next_step="Give more of the URL: s3://bucket/folder."
        )
    user, _, password = userinfo.partition(":")
    secrets = {userinfo, password, unquote(password), query}
    secrets |= {value for _, value in parse_qsl(query)}
    if scheme in ("s3", "s3a"):  # what stands there is no user's name but a key
        secrets |= {user, unquote(user)}
    label = f"{scheme}://{shown.rstrip('/')}"
    return Place(label, None, text, tuple(sorted(secret for secret in secrets if secret)))


def _split_user(rest: str) -> tuple[str, str]:
    """Return ``user:password`` and what follows; a password may hold a slash, by mistake."""
    authority = rest.partition("/")[0]
    if "@" in authority:
        user, _, host = authority.rpartition("@")
        return user, host + rest[len(authority) :]
    if "@" in rest and ":" in authority and not _PORT.fullmatch(authority):
        user, _, host_and_path = rest.rpartition("@")
        return user, host_and_path
    return "", rest


def _split_query(text: str) -> tuple[str, str]:
    # A signed URL carries its signature there.
    shown, _, query = text.partition("?")
    return shown.partition("#")[0], query


def is_secret_name(name: str) -> bool:
    """Return whether the value of an option of that name had better not be shown."""
    return _SECRET_NAME.search(name.replace("-", "_")) is not None


def secrets_in(options: Mapping[str, Any], environ: Mapping[str, str]) -> set[str]:
    """Return values of options and environment whose names say that they are secret."""
    found: set[str] = set()
    for source in (options, environ):
        for name, value in source.items():
            if isinstance(value, Mapping):
                found |= secrets_in(value, {})
            elif isinstance(value, str) and is_secret_name(str(name)):
                found.add(value)
            elif isinstance(value, list | tuple) and is_secret_name(str(name)):
                found |= {item for item in value if isinstance(item, str)}
    return {value for value in found if value}
