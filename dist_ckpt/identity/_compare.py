"""How two identities differ. Pure, no I/O, no torch.

Part of layer 3.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt.identity._config import matches

__all__ = ["ABSENT", "Absent", "Difference", "compare"]


class Absent(enum.Enum):
    """The type of `ABSENT`."""

    ABSENT = "(absent)"

    def __str__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT  # one of the two has no such key; None is a value


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that isn't as it was.

    Attributes:
        part: "structure", "config", "data", "code" or "versions".
        key: What differs in it: a tensor's name, a dotted key of the configuration, …
        saved: Its value in the saved run, `ABSENT` if it had none.
        current: Its value now, likewise.
        word: What accepts it ("config.lr", "data"); empty where no word helps, since what was saved
            can't be put into what is there.
        warning: It doesn't keep a run from going on, unless asked for strictly.
    """

    part: str
    key: str
    saved: Any
    current: Any
    word: str
    warning: bool = False

    def __str__(self) -> str:
        name = f"{self.part}.{self.key}" if self.key else self.part
        return f"{name}: {_shown(self.saved)} saved, {_shown(self.current)} now"

    def to_json(self) -> dict[str, Any]:
        """Return the attributes as plain JSON; what is `ABSENT` has no key."""
        told = {"part": self.part, "key": self.key, "word": self.word, "warning": self.warning}
        values = {"saved": self.saved, "current": self.current}
        return told | {key: value for key, value in values.items() if value is not ABSENT}


def compare(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """Return every difference, those that refuse a resume first.

    What was known when it was saved and isn't now is a difference; what wasn't known then is a
    warning: there is nothing to compare with. Numbers are equal by value (1 and 1.0), true isn't 1.
    """
    differences = [
        *_structure(_part(saved, "structure"), _part(current, "structure")),
        *_config(saved, current),
        *_data(saved.get("data"), current.get("data")),
        *_code(_part(saved, "code"), _part(current, "code")),
        *_versions(_part(saved, "versions"), _part(current, "versions")),
    ]
    return sorted(differences, key=lambda difference: difference.warning)


def _part(identity: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = identity.get(name)
    return part if isinstance(part, Mapping) else {}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _by_key(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in [*saved, *(key for key in current if key not in saved)]:
        was, now = saved.get(key, ABSENT), current.get(key, ABSENT)
        if not _same(was, now):
            yield key, was, now


def _structure(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    if saved.get("digest") == current.get("digest"):
        return
    word = "structure"
    found = False
    for kind in ("parameters", "buffers"):
        for key, was, now in _by_key(_part(saved, kind), _part(current, kind)):
            found = True
            # Tensors have to fit: by no word does a saved one get another shape.
            yield Difference("structure", f"{kind}.{key}", was, now, "")
    if not _same(saved.get("ties"), current.get("ties")):
        found = True
        fits = _is_untied(saved.get("ties") or [], current.get("ties") or [])
        word = word if fits else ""
        yield Difference("structure", "ties", saved.get("ties"), current.get("ties"), word)
    if not found:  # a saved identity of another making
        yield Difference("structure", "digest", saved.get("digest"), current.get("digest"), word)


def _is_untied(saved: list[list[str]], current: list[list[str]]) -> bool:
    """Return whether what is tied now was tied then: one value goes into two, not back."""
    before = [set(group) for group in saved]
    return all(any(set(group) <= names for names in before) for group in current)


def _config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    was, now = saved.get("config"), current.get("config")
    if was is None or now is None:
        if was is not now:
            told = ABSENT if was is None else "a configuration", "none" if now is None else "one"
            yield Difference("config", "", *told, "config", warning=was is None)
        return
    ignored = current.get("config_ignore") or ()
    for key, before, after in _by_key(was, now):
        if not matches(key, ignored):
            yield Difference("config", key, before, after, _config_word(key))


def _config_word(key: str) -> str:
    # The words of the environment variable are cut at commas.
    return f"config.{key}" if key and "," not in key and key == key.strip() else "config"


def _data(saved: Any, current: Any) -> Iterator[Difference]:
    was = saved if isinstance(saved, Mapping) else None
    now = current if isinstance(current, Mapping) else None
    if was is None or now is None:
        if was is not now:
            named = [ABSENT if data is None else _data_name(data) for data in (was, now)]
            yield Difference("data", "", named[0], named[1], "data", warning=was is None)
        return
    sizes = was.get("batch_size"), now.get("batch_size")
    if None not in sizes and sizes[0] != sizes[1]:  # None: written before this was kept
        yield Difference("data", "batch_size", *sizes, "data.batch_size")
    if was.get("id") is not None or now.get("id") is not None:
        if was.get("id") != now.get("id"):
            yield Difference("data", "id", was.get("id"), now.get("id"), "data")
        return
    if was.get("length") != now.get("length"):
        yield Difference("data", "length", was.get("length"), now.get("length"), "data")
    elif was.get("digest") != now.get("digest"):
        # Whether a digest can be had within the time is chance: that must not refuse a resume.
        chance = was.get("digest") is None or now.get("digest") is None
        yield Difference("data", "digest", was.get("digest"), now.get("digest"), "data", chance)


def _data_name(data: Mapping[str, Any]) -> str:
    return str(data.get("id") or f"{data.get('length')} samples")


def _code(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    for key, was, now in _by_key(saved, current):
        if was is not None and was is not ABSENT and now is not None and now is not ABSENT:
            yield Difference("code", key, was, now, "code", warning=True)


def _versions(saved: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Difference]:
    for key, was, now in _by_key(saved, current):
        yield Difference("versions", key, was, now, f"versions.{key}", warning=True)


def _shown(value: Any) -> str:
    if value is ABSENT:
        return str(value)
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:97]}…"
