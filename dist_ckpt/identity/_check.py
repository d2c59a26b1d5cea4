"""Whether a run may go on as another one: what was accepted, what is refused. No torch.

Part of layer 3. Reads one environment variable, no I/O.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from dist_ckpt.errors import IdentityError
from dist_ckpt.identity._compare import Difference, compare
from dist_ckpt.identity._config import as_patterns, matches
from dist_ckpt.identity._words import unknown_words
from dist_ckpt.wording import counted

__all__ = ["ACCEPT_VARIABLE", "carry_on", "check"]

ACCEPT_VARIABLE = "DIST_CKPT_ACCEPT"
_MAX_SHOWN = 20


def check(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    *,
    accept: Collection[str] | str = (),
    strict: bool = False,
) -> list[Difference]:
    """Return the differences that don't keep the run from going on: accepted ones, and warnings.

    Not collective. To be printed and journalled by the caller.

    Args:
        saved: The identity in the resume point.
        current: The live run's.
        accept: Words as printed by the error. A part accepts all of it ("config"), a parent its
            keys ("config.optimizer"), and patterns as of a shell are understood.
            ``DIST_CKPT_ACCEPT`` adds to them, its words set apart by commas.
        strict: Refuse a change of code and of versions too.

    Raises:
        IdentityError: Differences that no word accepts. Prints at most 20, and the words; carries
            all of them as ``differences`` (plain JSON), the words as ``words``, and the variable's
            whole value as ``accept``: without given words that can't name anything.
    """
    from_environment = os.environ.get(ACCEPT_VARIABLE, "").split(",")
    given = [word.strip() for word in [*as_patterns(accept), *from_environment] if word.strip()]
    differences = compare(saved, current)
    refused = [
        difference
        for difference in differences
        if (strict or not difference.warning) and not _accepted(difference, given)
    ]
    if refused:
        slips = unknown_words(given, [saved, current])
        raise _error(refused, [word for word in given if word not in slips or _may_mean(word)])
    return differences


def carry_on(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``current`` as the run's new identity, completed by what ``saved`` knew.

    What is taken over is the digest of data of the same length: one slow day must not take the
    protection from all days after it.
    """
    carried = copy.deepcopy(dict(current))
    was, now = saved.get("data"), carried.get("data")
    if isinstance(was, Mapping) and isinstance(now, dict) and now.get("digest") is None:
        same = ("id", "length")
        if all(was.get(key) == now.get(key) for key in same) and now.get("id") is None:
            sizes = {key: now[key] for key in ("batch_size",) if key in now}
            carried["data"] = copy.deepcopy(dict(was)) | sizes
    return carried


def _may_mean(word: str) -> bool:
    """Return whether a word that isn't known here may be about a part identities don't tell of."""
    return word.partition(".")[0] in ("extra", "policy", "scaler", "scheduler")


def _accepted(difference: Difference, words: Collection[str]) -> bool:
    named = f"{difference.part}.{difference.key}" if difference.key else difference.part
    return matches(named, words)


def _error(refused: list[Difference], given: list[str]) -> IdentityError:
    shown = [f"  {difference}" for difference in refused[:_MAX_SHOWN]]
    if len(refused) > _MAX_SHOWN:
        shown.append(f"  … and {len(refused) - _MAX_SHOWN} more")
    hopeless = {difference.part for difference in refused if not difference.word}
    words = list(dict.fromkeys(item.word for item in refused if item.part not in hopeless))
    value = ",".join(dict.fromkeys([*given, *words]))
    listed = "\n".join(shown)
    return IdentityError(
        f"This isn't the run that was saved ({counted(len(refused), 'difference')}):\n{listed}\n",
        next_step=_next_step(words, value, hopeless=bool(hopeless)),
        differences=[difference.to_json() for difference in refused],
        words=words,
        accept=value,
    )


def _next_step(words: list[str], value: str, *, hopeless: bool) -> str:
    accept = f"accept=({', '.join(map(repr, words))},) or {ACCEPT_VARIABLE}={shlex.quote(value)}"
    if not hopeless:
        return f"Go back to what was saved, or accept it: {accept}"
    return (
        "What was saved doesn't fit into this model, and no word makes it: build the model as it "
        "was, or begin another run in a directory of its own. Single tensors can be read with "
        "dist_ckpt.open_run(RUN).latest().tensor(NAME)."
    )
