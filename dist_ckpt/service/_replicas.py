"""Whether what ranks call by one name is one thing. Layer 6, collective.

Of a parameter that several ranks hold whole, one rank writes one copy. That is right for replicas,
and loses a rank's weights where two stages of a pipeline both call their first layer ``0``.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import torch
import xxhash

from dist_ckpt.capture import Captured, is_sharded
from dist_ckpt.comm import Comm
from dist_ckpt.errors import MismatchError
from dist_ckpt.wording import counted

__all__ = ["check_replicas"]

#: Of a larger tensor so many bytes are compared, spread over it.
_SAMPLE_BYTES = 1 << 20


def check_replicas(comm: Comm, captured: Captured, *, accept: Collection[str] = ()) -> None:
    """Return if parameters of one name have the same values on all ranks that hold them whole.

    For the start of a run, where nothing has been restored that would have made them so. Large
    tensors are sampled. What torch itself keeps as one global tensor is its own affair; and
    ``"replicas"`` in ``accept`` accepts whatever there is.

    Raises:
        MismatchError: They differ; on every rank.
    """
    if comm.world_size == 1 or "replicas" in accept:
        return
    mine = {
        name: _digest(parameter)
        for name, parameter in captured.parameters().items()
        if not is_sharded(parameter)
    }
    text = json.dumps(mine, sort_keys=True).encode()
    word = xxhash.xxh3_64(text).intdigest() >> 1  # fits an int64, and so does its negative
    most, least = comm.agree([word, -word], phase="comparing replicas")
    if most != -least:
        _compare([json.loads(data) for data in comm.gather(text, phase="comparing replicas")])


def _compare(ranks: list[dict[str, str]]) -> None:
    first: dict[str, tuple[int, str]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, digests in enumerate(ranks):
        for name, digest in digests.items():
            known = first.setdefault(name, (rank, digest))
            if known[1] != digest:
                different.setdefault(name, (known[0], rank))
    if not different:
        return
    name, (one, other) = next(iter(different.items()))
    have = "has" if len(different) == 1 else "have"
    raise MismatchError(
        f"{counted(len(different), 'parameter')} {have} other values on some ranks than on "
        f"others, among them {name!r} on ranks {one} and {other}: of equal names one copy is kept.",
        next_step="Stages of a pipeline need names of their own (model={'stage1': …}); replicas "
        "must start equal (DistributedDataParallel sees to it). accept=('replicas',) keeps the "
        "first rank's.",
        different=sorted(different),
    )


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    step = max(flat.nbytes // _SAMPLE_BYTES, 1)
    sample = flat[::step].clone(memory_format=torch.contiguous_format).cpu()
    shape = f"{tensor.dtype} {list(tensor.shape)} ".encode()
    found = xxhash.xxh3_64(shape)
    found.update(sample.view(torch.uint8).numpy().data)
    return str(found.hexdigest())
