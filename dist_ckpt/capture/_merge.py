"""One account of what several ranks hold: names, parts and groups put together. Layer 3, pure.

Most jobs have the same objects on every rank. With pipeline stages each rank has other parameters,
and with `ZeroRedundancyOptimizer` each has the state of some: then no rank's own account is whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dist_ckpt.capture._values import Structure
from dist_ckpt.errors import MismatchError
from dist_ckpt.tree import JSON

__all__ = ["frame_of", "merge_frames", "merge_structures", "with_frame", "with_values"]

#: What of an optimizer names parameters, besides its groups.
_NAMED = ("kind", "layouts", "homes", "trees", "orders")
_SAME_NEXT_STEP = "Build the same optimizers with the same number of groups on every rank."


def merge_structures(ranks: Sequence[Structure]) -> Structure:
    """Return the structure of the whole model, each name once, by rank and then as a rank has it.

    Raises:
        MismatchError: One name is of two shapes or dtypes.
    """
    parameters: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    buffers: dict[str, tuple[str, str, tuple[int, ...]]] = {}
    aliases: dict[tuple[str, str], None] = {}
    for rank, structure in enumerate(ranks):
        for known, rows in ((parameters, structure.parameters), (buffers, structure.buffers)):
            for row in rows:
                if known.setdefault(row[0], row) != row:
                    _, dtype, shape = known[row[0]]
                    raise MismatchError(
                        f"Rank {rank} holds {row[0]} as {row[1]}{list(row[2])}, an earlier rank as "
                        f"{dtype}{list(shape)}.",
                        next_step="Pipeline stages need names of their own: model={'stage1': …}.",
                        name=row[0],
                        rank=rank,
                    )
        aliases.update(dict.fromkeys(structure.aliases))
    return Structure(tuple(parameters.values()), tuple(buffers.values()), tuple(aliases))


def frame_of(shared: Mapping[str, JSON], aliases: Mapping[str, str]) -> dict[str, JSON]:
    """Return what in a rank's shared values names things; it seldom changes from save to save."""
    optimizers = {
        key: {
            **{name: entry[name] for name in _NAMED if name in entry},
            "groups": [group["params"] for group in entry["groups"]],
        }
        for key, entry in shared["optimizers"].items()
    }
    return {
        "parts": shared["parts"],
        "optimizers": optimizers,
        "ties": shared["ties"],
        "aliases": dict(aliases),
    }


def merge_frames(ranks: Sequence[Mapping[str, JSON]]) -> dict[str, JSON]:
    """Return the frame of the whole job; ``part_ranks`` names the rank of each part 0 lacks.

    Raises:
        MismatchError: An optimizer is of two kinds, or has other numbers of groups on other ranks.
    """
    merged: dict[str, Any] = {"parts": {}, "optimizers": {}, "ties": {}, "aliases": {}}
    part_ranks: dict[str, int] = {}
    for rank, frame in enumerate(ranks):
        for word, kind in frame["parts"].items():
            if word not in merged["parts"]:
                merged["parts"][word] = kind
                if rank:
                    part_ranks[word] = rank
        for kind in ("ties", "aliases"):
            merged[kind] = {**frame[kind], **merged[kind]}
        for key, entry in frame["optimizers"].items():
            _merge_optimizer(merged["optimizers"], key, entry, rank)
    return {**merged, "part_ranks": part_ranks}


def _merge_optimizer(merged: dict[str, Any], key: str, entry: Mapping[str, Any], rank: int) -> None:
    known = merged.get(key)
    if known is None:
        merged[key] = {**entry, "groups": [list(names) for names in entry["groups"]]}
        return
    if (known["kind"], len(known["groups"])) != (entry["kind"], len(entry["groups"])):
        raise MismatchError(
            f"Rank {rank}'s optimizer {key!r} is {entry['kind']} with {len(entry['groups'])} "
            f"groups, an earlier rank's {known['kind']} with {len(known['groups'])}.",
            next_step=_SAME_NEXT_STEP,
            rank=rank,
        )
    for names, more in zip(known["groups"], entry["groups"], strict=True):
        if names != more:
            present = set(names)
            names += [name for name in more if name not in present]
    known["layouts"] = known["layouts"] + [
        layout for layout in entry["layouts"] if layout not in known["layouts"]
    ]
    known["homes"] = {**entry["homes"], **known["homes"]}
    known["trees"] = {**entry["trees"], **known["trees"]}
    if "orders" in entry:
        known["orders"] = {**entry["orders"], **known.get("orders", {})}


def with_frame(shared: Mapping[str, JSON], frame: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return a rank's shared values under the names of all ranks.

    Groups of optimizers that this rank doesn't have are without values.
    """
    optimizers = {}
    for key, entry in frame["optimizers"].items():
        own = shared["optimizers"].get(key)
        values = (
            [{}] * len(entry["groups"]) if own is None else [g["values"] for g in own["groups"]]
        )
        groups = [
            {"params": names, "values": value}
            for names, value in zip(entry["groups"], values, strict=True)
        ]
        optimizers[key] = {**entry, "groups": groups}
    more = {"part_ranks": frame["part_ranks"]} if frame["part_ranks"] else {}
    named = {"parts": frame["parts"], "optimizers": optimizers, "ties": frame["ties"]}
    return {**shared, **named, **more}


def with_values(shared: Mapping[str, JSON], ranks: Sequence[Mapping[str, JSON]]) -> dict[str, JSON]:
    """Return the whole job's shared values with what these ranks had of groups and schedulers.

    Args:
        shared: Of the resume point.
        ranks: Shared values of single ranks; an earlier one counts before a later.
    """
    result = dict(shared)
    for own in reversed(ranks):
        for kind in ("schedulers", "scalers"):
            result[kind] = {**result[kind], **own[kind]}
        optimizers = dict(result["optimizers"])
        for key, entry in own["optimizers"].items():
            whole = optimizers.get(key)
            if whole is None or len(whole["groups"]) != len(entry["groups"]):
                continue
            pairs = zip(whole["groups"], entry["groups"], strict=True)
            groups = [{**group, "values": mine["values"]} for group, mine in pairs]
            optimizers[key] = {**whole, "groups": groups}
        result["optimizers"] = optimizers
    return result
