"""Which data a loader reads: length, and a digest of 16 samples fetched twice.

Part of layer 3. Runs the user's dataset. Leaves the loader and all global generators as they are.
Where the loader fetches in workers, so does this: a file that a dataset opens at its first fetch
must not be shared by the trainer and all its workers.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import time
import warnings
from multiprocessing import process
from typing import Any

import torch
from torch.utils.data import IterableDataset

from dist_ckpt.identity._sample import UndigestibleError, sample_digest
from dist_ckpt.seeding import derive_key, kept_generators, mix, seed_generators

__all__ = ["describe_data"]

_NUM_SAMPLES = 16
_PURPOSE_IDENTITY = 3
#: From SIGKILL to giving up: a process that is stuck in the kernel can't be waited for.
_GONE_SECS = 10.0
_ALONE = "is told by its length alone"


def describe_data(data: Any, limit_secs: float, notes: list[str]) -> dict[str, Any] | None:
    """Return ``{"id": None, "length", "digest", "samples"}``; None without a length.

    ``digest`` is None where samples can't be fetched, can't be written down, differ when fetched
    again, or take longer than ``limit_secs``; ``notes`` gets a sentence that says so.
    """
    dataset = getattr(data, "dataset", None)
    length = _length(dataset)
    if length is None:
        notes.append(
            f"The data can't be recognised at a resume: {type(data).__name__} has no dataset of "
            "known length. Give data_id=."
        )
        return None
    outcome: dict[str, str]
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        outcome = {"why": "its samples can't be fetched by number"}
    elif length == 0:
        outcome = {"why": "it is empty"}
    elif _fetches_in_forks(data):
        outcome = _digest_in_fork(dataset, length, limit_secs)
    else:
        outcome = _digest(dataset, length, limit_secs)
    if "digest" not in outcome:
        notes.append(f"The data {_ALONE} ({length}): {outcome['why']}. Give data_id= to be sure.")
    digest = outcome.get("digest")
    samples = min(_NUM_SAMPLES, length) if digest else 0
    return {"id": None, "length": length, "digest": digest, "samples": samples}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None


def _indices(length: int) -> list[int]:
    """Return up to 16 sample numbers, first and last among them; ``length`` alone decides."""
    if length <= _NUM_SAMPLES:
        return list(range(length))
    chosen = {0, length - 1}
    key, number = derive_key(0, length, _PURPOSE_IDENTITY), 0
    while len(chosen) < _NUM_SAMPLES:
        chosen.add(mix(key, number) % length)
        number += 1
    return sorted(chosen)


def _digest(dataset: Any, length: int, limit_secs: float) -> dict[str, str]:
    """Return ``{"digest": …}`` or ``{"why": …}``."""
    started = time.monotonic()
    passes: list[list[bytes]] = [[], []]
    key = derive_key(0, 0, _PURPOSE_IDENTITY)
    with kept_generators():
        for digests in passes:
            for index in _indices(length):
                seed_generators(mix(key, index))
                try:
                    digests.append(sample_digest(dataset[index]))
                except UndigestibleError as error:
                    return {"why": f"a sample holds {error}"}
                except Exception as error:  # noqa: BLE001 - any error of the user's dataset
                    return {"why": f"fetching sample {index} failed with {error!r:.200}"}
                if time.monotonic() - started > limit_secs:
                    return {"why": f"fetching samples takes longer than {limit_secs:g} s"}
    if passes[0] != passes[1]:
        return {"why": "a sample that was fetched twice differs"}
    return {"digest": f"sha256:{hashlib.sha256(b''.join(passes[0])).hexdigest()}"}


def _fetches_in_forks(data: Any) -> bool:
    if not getattr(data, "num_workers", 0):
        return False
    context = getattr(data, "multiprocessing_context", None)
    if context is None:
        return multiprocessing.get_start_method() == "fork"
    name = context if isinstance(context, str) else context.get_start_method()
    return bool(name == "fork")


def _digest_in_fork(dataset: Any, length: int, limit_secs: float) -> dict[str, str]:
    """As `_digest`, in a child that is killed when it takes too long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_report, args=(sender, dataset, length, limit_secs), daemon=True)
    with receiver:
        with sender, warnings.catch_warnings():
            # Python 3.12 warns of forking beside threads; the loader's own workers are started just
            # so.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                child.start()
            except (OSError, AssertionError) as error:  # no memory; daemons can't have children
                return {"why": f"no process could be started to fetch samples ({error})"}
        try:
            if not receiver.poll(limit_secs + 0.5):
                return {"why": f"fetching samples takes longer than {limit_secs:g} s"}
            outcome: dict[str, str] = json.loads(receiver.recv_bytes())
            return outcome
        except EOFError:
            return {"why": "the process that fetched samples died"}
        finally:
            _end(child)


def _end(child: Any) -> None:
    child.kill()
    child.join(_GONE_SECS)
    if not child.is_alive():
        child.close()
        return
    # Or the exit of this process waits for it.
    process._children.discard(child)  # type: ignore[attr-defined] # noqa: SLF001
    warnings.warn(
        f"dist_ckpt: the process {child.pid} that fetched samples is not gone after SIGKILL and is "
        "left alone: look at the disk that it reads from.",
        stacklevel=2,
    )


def _report(sender: Any, dataset: Any, length: int, limit_secs: float) -> None:
    torch.set_num_threads(1)  # OpenMP's threads don't outlive a fork
    sender.send_bytes(json.dumps(_digest(dataset, length, limit_secs)).encode())
