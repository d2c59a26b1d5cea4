"""`checkpoint.pt`: written with its fingerprint, and loaded only when everything about it fits."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dist_ckpt
from experiment import CONFIG, NUM_PARAMETERS, ROWS_PATH

SCHEMA = "kernodeck.checkpoint/1"
CHECKPOINT = "checkpoint.pt"
FINGERPRINT = "checkpoint.pt.sha256"
SUMMARY = "summary.json"
#: A checkpoint of 33 parameters has some 30 KB; a larger file isn't even read.
LIMIT_BYTES = 1 << 20

_KEYS: dict[str, type] = {
    "schema": str,
    "model": dict,
    "optimizer": dict,
    "scheduler": dict,
    "progress": dict,
    "data": dict,
    "history": list,
    "rng": dict,
    "config": dict,
    "versions": dict,
    "identity": dict,
}
_RNG_KEYS = {"python", "numpy", "torch"}


class RefusedError(Exception):
    """A checkpoint isn't loaded; ``check`` names what speaks against it."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(f"refused ({check}): {message}")
        self.check = check


def versions() -> dict[str, str]:
    """Return what computes: Python, torch, NumPy, dist_ckpt."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "dist_ckpt": dist_ckpt.__version__,
    }


def identity() -> dict[str, str]:
    """Return digests of the code beside this file and of the data."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.glob("*.py")):
        code.update(f"{path.name}\n".encode() + path.read_bytes())
    data = hashlib.sha256(ROWS_PATH.read_bytes())
    return {"code": f"sha256:{code.hexdigest()}", "data": f"sha256:{data.hexdigest()}"}


def write_checkpoint(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Have `checkpoint.pt` and its fingerprint in ``folder``; return size and fingerprint.

    The file is loaded once as a resume would load it, before anyone may rely on it.
    """
    body = {
        "schema": SCHEMA,
        **state,
        "config": CONFIG,
        "versions": versions(),
        "identity": identity(),
    }
    buffer = io.BytesIO()
    torch.save(body, buffer)
    data = buffer.getvalue()
    _check_content(_load(data))
    digest = hashlib.sha256(data).hexdigest()
    (folder / CHECKPOINT).write_bytes(data)
    (folder / FINGERPRINT).write_text(f"{digest}  {CHECKPOINT}\n", encoding="ascii")
    return {"size_bytes": len(data), "sha256": digest}


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint that passed every check, its progress among them.

    Raises:
        RefusedError: As `read_checkpoint`, or progress, data and states aren't of one instant.
    """
    body = read_checkpoint(path)
    check_progress(body)
    return body


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of this experiment; nothing in it is executed.

    The fingerprint shows that bytes changed, not who sent them.

    Raises:
        RefusedError: Fingerprint, size, content, schema, versions, code, data or configuration
            don't fit.
    """
    recorded = _fingerprint(path)
    size = _size(path)
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if len(data) != size or found != recorded:
        raise RefusedError("fingerprint", f"{path} has {found}, its fingerprint is {recorded}")
    body = _load(data)
    _check_content(body)
    return body


def _fingerprint(path: Path) -> str:
    beside = path.with_name(f"{path.name}.sha256")
    try:
        text = beside.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise RefusedError("fingerprint", f"{beside} can't be read: {error}") from error
    match = re.fullmatch(r"([0-9a-f]{64})  (\S+)\n", text)
    if match is None or match[2] != path.name:
        raise RefusedError("fingerprint", f"{beside} isn't the fingerprint of {path.name}")
    return match[1]


def _size(path: Path) -> int:
    summary = path.with_name(SUMMARY)
    try:
        recorded = json.loads(summary.read_bytes())["checkpoint"]["size_bytes"]
        size = path.stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RefusedError("size", f"{summary} or {path} can't be read: {error!r}") from error
    if size != recorded or not 0 < size <= LIMIT_BYTES:
        raise RefusedError(
            "size", f"{path} has {size} bytes, recorded are {recorded}, {LIMIT_BYTES} at most"
        )
    return size


def _load(data: bytes) -> dict[str, Any]:
    try:
        body = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the reader meets, the file isn't one of ours
        first = str(error).splitlines()[0] if str(error) else repr(error)
        raise RefusedError(
            "content", f"it can't be loaded with weights_only=True: {first}"
        ) from error
    if not isinstance(body, dict):
        raise RefusedError("schema", f"it holds a {type(body).__name__}, not a dict")
    return body


def _check_content(body: dict[str, Any]) -> None:
    _check_schema(body)
    for check, here in (("versions", versions()), ("config", CONFIG)):
        if body[check] != here:
            raise RefusedError(check, _first_difference(body[check], here))
    for name, digest in identity().items():
        saved = body["identity"].get(name)
        if saved != digest:
            raise RefusedError(name, f"saved with {saved}, here it is {digest}")


def _check_schema(body: dict[str, Any]) -> None:
    if body.get("schema") != SCHEMA:
        raise RefusedError("schema", f"it says {body.get('schema')!r}, known is {SCHEMA!r}")
    if set(body) != set(_KEYS):
        missing, extra = sorted(set(_KEYS) - set(body)), sorted(map(str, set(body) - set(_KEYS)))
        raise RefusedError("schema", f"missing {missing}, unknown {extra}")
    for key, kind in _KEYS.items():
        if not isinstance(body[key], kind):
            raise RefusedError("schema", f"{key} is a {type(body[key]).__name__}")
    tensors = list(body["model"].values())
    if not all(isinstance(item, torch.Tensor) and item.dtype is torch.float64 for item in tensors):
        raise RefusedError("schema", "the model isn't float64 throughout")
    if sum(item.numel() for item in tensors) != NUM_PARAMETERS:
        raise RefusedError("schema", f"the model hasn't {NUM_PARAMETERS} parameters")
    if not all(bool(torch.isfinite(item).all()) for item in tensors):
        raise RefusedError("schema", "a parameter isn't finite")
    if set(body["rng"]) != _RNG_KEYS:
        raise RefusedError("schema", f"rng holds {sorted(body['rng'])}, not {sorted(_RNG_KEYS)}")


def check_progress(body: dict[str, Any]) -> None:
    """Return if progress, history, data, optimizer and scheduler are of one instant.

    Raises:
        RefusedError: They aren't.
    """
    step, history = body["progress"].get("step"), body["history"]
    if type(step) is not int or step < 1 or len(history) != step:
        raise RefusedError("progress", f"step {step} with {len(history)} entries of history")
    num_rows, batch = CONFIG["rows"], CONFIG["batch_size"]
    epoch = -(-step * batch // num_rows)
    cursor = step * batch - (epoch - 1) * num_rows
    found = (body["progress"].get("epoch"), body["data"].get("cursor"))
    if found != (epoch, cursor):
        raise RefusedError(
            "progress", f"epoch and cursor are {found}; step {step} calls for {(epoch, cursor)}"
        )
    permutation = body["data"].get("permutation")
    if not isinstance(permutation, list) or sorted(permutation) != list(range(num_rows)):
        raise RefusedError("progress", f"the permutation isn't one of {num_rows} rows")
    used = [row for entry in history for row in entry["rows"]]
    if len(used) != step * batch or used[-cursor:] != permutation[:cursor]:
        raise RefusedError("progress", "the rows used aren't those of permutation and cursor")
    updates = {int(item["step"]) for item in body["optimizer"]["state"].values()}
    if updates != {step} or body["scheduler"].get("last_epoch") != step:
        raise RefusedError(
            "progress",
            f"the optimizer made {sorted(updates)} updates, the scheduler "
            f"{body['scheduler'].get('last_epoch')}, progress says {step}",
        )


def _first_difference(saved: dict[str, Any], here: dict[str, Any]) -> str:
    for key in sorted({*saved, *here}):
        if saved.get(key) != here.get(key):
            return f"{key} was {saved.get(key)!r}, here it is {here.get(key)!r}"
    return "the same values with other types"
