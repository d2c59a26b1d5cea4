"""The form of what was saved, checked before anything is looked up in it. Layer 3, pure.

Digests show that bytes are those that were written, not that this package wrote them. What is
inside the trees is checked where they are decoded.
"""

from __future__ import annotations

from typing import Any, NoReturn

from dist_ckpt.errors import CorruptFileError
from dist_ckpt.tree import JSON

__all__ = ["check_rank", "check_shared"]


def check_shared(node: JSON) -> None:
    """Return if ``node`` has the form of `Captured.shared_values`.

    Raises:
        CorruptFileError: It hasn't; the message says where.
    """
    for word, kind in _object(node, "shared", "parts").items():
        if kind is not None:
            _require(kind, str, f"shared.parts.{word}")
        _check_home(node, word)
    for key, entry in _object(node, "shared", "optimizers").items():
        _check_optimizer(entry, f"shared.optimizers.{key}")
    _texts(_object(node, "shared", "ties"), "shared.ties")
    for kind in ("schedulers", "scalers"):
        for word, entry in _object(node, "shared", kind).items():
            _field(entry, f"shared.{kind}.{word}", "state")
    ranks = _require(node.get("part_ranks", {}), dict, "shared.part_ranks")
    for word, rank in ranks.items():
        if type(rank) is not int or rank < 0:
            _refuse(f"shared.part_ranks.{word}")


def check_rank(node: JSON) -> None:
    """Return if ``node`` has the form of `Captured.rank_values`.

    Raises:
        CorruptFileError: It hasn't; the message says where.
    """
    _object(node, "values", "values")
    for names in _require(node.get("gradients", {}), dict, "values.gradients").values():
        _all_texts(_require(names, list, "values.gradients"), "values.gradients")
    rng = _object(node, "values", "rng")
    for name in ("python", "numpy", "torch", "cuda"):
        _field(rng, "values.rng", name)
    for name, entry in _object(rng, "values.rng", "named").items():
        where = f"values.rng.named.{name}"
        _require(_field(entry, where, "kind"), str, where)
        _field(entry, where, "state")


def _check_home(node: JSON, word: str) -> None:
    """Return if a part that was kept for all ranks has its state where it belongs."""
    kind, _, key = word.partition(".")
    if kind == "optimizer":
        _field(_object(node, "shared", "optimizers"), "shared.optimizers", key)
    elif kind in ("scheduler", "scaler"):
        _field(_object(node, "shared", f"{kind}s"), f"shared.{kind}s", word)


def _check_optimizer(entry: Any, where: str) -> None:
    _require(_field(entry, where, "kind"), str, where)
    for group in _list(entry, where, "groups"):
        _field(group, where, "values")
        _all_texts(_list(group, where, "params"), where)
    for layout in _list(entry, where, "layouts"):
        _all_texts(_require(layout, list, where), where)
    _texts(_object(entry, where, "homes"), where)
    _object(entry, where, "trees")
    orders = _require(entry.get("orders", {}), dict, f"{where}.orders")
    for name, paths in orders.items():
        for path, order in _require(paths, dict, f"{where}.orders.{name}").items():
            if any(type(dim) is not int for dim in _require(order, list, f"{where}.orders")):
                _refuse(f"{where}.orders.{name}.{path}")


def _field(node: Any, where: str, name: str) -> Any:
    if not isinstance(node, dict) or name not in node:
        _refuse(f"{where}.{name}")
    return node[name]


def _object(node: Any, where: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = _require(_field(node, where, name), dict, f"{where}.{name}")
    return found


def _list(node: Any, where: str, name: str) -> list[Any]:
    found: list[Any] = _require(_field(node, where, name), list, f"{where}.{name}")
    return found


def _texts(node: dict[str, Any], where: str) -> None:
    _all_texts(list(node.values()), where)


def _all_texts(items: list[Any], where: str) -> None:
    for item in items:
        _require(item, str, where)


def _require(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        _refuse(where)
    return value


def _refuse(where: str) -> NoReturn:
    raise CorruptFileError(
        f"The saved state isn't of the form that dist_ckpt writes: {where} is missing or another "
        "kind of value.",
        next_step="Verify the generation, or use another.",
        found=where,
    )
