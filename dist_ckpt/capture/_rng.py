"""States of all random number generators as JSON, exact, and back. Layer 3, main thread only.

Python's, NumPy's and torch's global generators, CUDA's of each device that the model lies on and of
the current one, and every generator that the program names. Integers, text and bytes only, nothing
pickled. Threads share torch's global generator: no other thread may draw meanwhile.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from dist_ckpt.errors import CorruptFileError, MismatchError, UnsupportedValueError
from dist_ckpt.tree import JSON, decode_tree, encode_tree

__all__ = ["Generator", "cuda_devices", "draw_rng", "encode_rng", "restore_rng"]

Generator: TypeAlias = "torch.Generator | np.random.Generator | random.Random"

_BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_Setter: TypeAlias = Callable[[], None]


def cuda_devices(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return the index of each CUDA device that one of ``tensors`` lies on."""
    if not _cuda_is_used():
        return frozenset()
    devices = {tensor.device for tensor in tensors}
    return frozenset(d.index for d in devices if d.type == "cuda" and d.index is not None)


def encode_rng(generators: Mapping[str, Generator], devices: Iterable[int] = ()) -> JSON:
    """Return the state of every generator: ``{"python", "numpy", "torch", "cuda", "named"}``.

    ``cuda`` is None where CUDA wasn't used in this process: asking would initialise it.

    Args:
        generators: The program's own, by name.
        devices: CUDA devices whose generators are kept, besides the current one.

    Raises:
        UnsupportedValueError: An unknown kind of generator, by name.
    """
    numpy_state = _numpy_state()
    _check_bit_generator(str(numpy_state["bit_generator"]), "rng/numpy")
    return {
        "python": encode_tree(random.getstate(), path="rng/python"),
        "numpy": encode_tree(numpy_state, path="rng/numpy"),
        "torch": encode_tree(_raw(torch.get_rng_state()), path="rng/torch"),
        "cuda": _encode_cuda(devices) if _cuda_is_used() else None,
        "named": {name: _encode_named(name, item) for name, item in generators.items()},
    }


def restore_rng(
    saved: JSON,
    generators: Mapping[str, Generator],
    devices: Iterable[int] = (),
    *,
    skip: Any = (),
) -> list[str]:
    """Every generator goes on from its saved state; named ones in ``skip`` are left alone.

    All states are decoded and checked before the first is set. A state of a CUDA device that isn't
    in use here goes to the one that is instead, where one is left on both sides.

    Returns:
        A note for each CUDA generator that has no state, and each state without a generator.

    Raises:
        MismatchError: A generator is of another kind here than it was.
        CorruptFileError: A state that its generator doesn't take.
    """
    notes: list[str] = []
    setters = [
        _plan("rng/python", saved["python"], random.setstate),
        _plan_numpy(saved["numpy"]),
        _plan("rng/torch", saved["torch"], _from_raw(torch.set_rng_state)),
    ]
    if saved["cuda"] is not None:
        if torch.cuda.is_available():
            states = _place_cuda(decode_tree(saved["cuda"]), _kept(devices), notes)
            setters += [
                _setter(f"rng/cuda:{index}", state, _from_raw(partial(_set_cuda, index)))
                for index, state in states.items()
            ]
        else:
            notes.append("rng/cuda: left out, this machine has no CUDA device")
    for name, node in saved["named"].items():
        if name in skip or name not in generators:
            continue
        found = _kind(generators[name], name)
        if found != node["kind"] and node["kind"] == "torch:cuda" and not torch.cuda.is_available():
            notes.append(f"generators.{name}: left out, this machine has no CUDA device")
            continue
        _check_kind(f"generators.{name}", node["kind"], found)
        setters.append(_plan(f"generators.{name}", node["state"], _named_setter(generators[name])))
    for setter in setters:
        setter()
    return notes


def draw_rng(
    generators: Mapping[str, Generator], devices: Iterable[int] = ()
) -> dict[str, list[Any]]:
    """Return the next draws of every generator, put back: no state has changed after it."""
    before = encode_rng(generators, devices)
    indices = _kept(devices) if before["cuda"] is not None else []
    cuda = {
        f"cuda:{index}" if len(indices) > 1 else "cuda": torch.rand(3, device=f"cuda:{index}")
        for index in indices
    }
    draws = {
        "python": _draw_python(random),
        "numpy": _draw_numpy(np.random),
        "torch": [*torch.randn(2).tolist(), *torch.rand(3).tolist()],
        **{name: draws.tolist() for name, draws in cuda.items()},
        **{f"generators.{name}": _draw_named(item) for name, item in generators.items()},
    }
    restore_rng(before, generators, devices)
    return draws


def _numpy_state() -> dict[str, Any]:
    # The global generator is what programs draw from, however old its interface.
    return dict(np.random.get_state(legacy=False))  # noqa: NPY002


def _cuda_is_used() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _kept(devices: Iterable[int]) -> list[int]:
    """Return the devices whose generators are kept: what names no device draws on the current."""
    return sorted({torch.cuda.current_device(), *devices})


def _encode_cuda(devices: Iterable[int]) -> JSON:
    states = {str(index): _raw(torch.cuda.get_rng_state(index)) for index in _kept(devices)}
    return encode_tree(states, path="rng/cuda")


def _set_cuda(index: int, state: torch.Tensor) -> None:
    torch.cuda.set_rng_state(state, index)


def _place_cuda(saved: Any, here: list[int], notes: list[str]) -> dict[int, bytes]:
    """Return device → its state to be; ``notes`` says what doesn't fit."""
    if isinstance(saved, bytes):  # of a device that isn't named: older, or derived for a new rank
        if len(here) > 1:
            notes.append(f"rng/cuda: {_named(here)} go on from the one state that was saved")
        return dict.fromkeys(here, saved)
    if not isinstance(saved, dict) or not all(
        type(key) is str and re.fullmatch("[0-9]{1,4}", key) and isinstance(state, bytes)
        for key, state in saved.items()
    ):
        raise _no_state("rng/cuda", "it isn't bytes by device")
    states = {int(key): state for key, state in saved.items()}
    lost = sorted(states.keys() - set(here))
    new = sorted(set(here) - states.keys())
    if len(lost) == len(new) == 1:
        return {**{i: s for i, s in states.items() if i in here}, new[0]: states[lost[0]]}
    if lost:
        notes.append(f"rng/cuda: states of {_named(lost)} left out, not in use here")
    if new:
        notes.append(f"rng/cuda: nothing saved for {_named(new)}, left as it is here")
    return {index: state for index, state in states.items() if index in here}


def _named(indices: list[int]) -> str:
    return ", ".join(f"cuda:{index}" for index in indices)


def _raw(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _from_raw(set_state: Callable[[torch.Tensor], Any]) -> Callable[[bytes], None]:
    def setter(raw: bytes) -> None:
        set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    return setter


def _kind(generator: object, name: str) -> str:
    if isinstance(generator, torch.Generator):
        return f"torch:{generator.device.type}"
    if isinstance(generator, np.random.Generator):
        kind = type(generator.bit_generator).__name__
        _check_bit_generator(kind, f"generators.{name}")
        return f"numpy:{kind}"
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return f"python:{type(generator).__name__}"
    what = f"is a {type(generator).__module__}.{type(generator).__qualname__}, which has no state"
    return _refuse(f"generators.{name}", what)


def _check_bit_generator(kind: str, path: str) -> None:
    if kind not in _BIT_GENERATORS:
        _refuse(path, f"uses NumPy's bit generator {kind}, which isn't known")


def _refuse(path: str, what: str) -> NoReturn:
    raise UnsupportedValueError(
        f"{path} {what}.",
        next_step="Use a torch.Generator, a random.Random or a NumPy Generator on "
        f"{', '.join(_BIT_GENERATORS)}.",
        path=path,
    )


def _check_kind(path: str, saved: str, found: str) -> None:
    if saved != found:
        raise MismatchError(
            f"{path} was saved as {saved} and is {found} here.",
            next_step=f"Give a {saved} generator, or start its stream anew: accept={path!r}.",
            missing=[],
            unexpected=[],
            different=[path],
        )


def _encode_named(name: str, generator: Generator) -> JSON:
    kind = _kind(generator, name)
    state: Any
    if isinstance(generator, torch.Generator):
        state = _raw(generator.get_state())
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    else:
        state = generator.getstate()
    return {"kind": kind, "state": encode_tree(state, path=f"generators.{name}")}


def _named_setter(generator: Generator) -> Callable[[Any], None]:
    if isinstance(generator, torch.Generator):
        return _from_raw(generator.set_state)
    if isinstance(generator, random.Random):
        return generator.setstate
    bits = generator.bit_generator
    return lambda state: setattr(bits, "state", state)


def _draw_python(source: Any) -> list[float]:
    return [source.gauss(0.0, 1.0), *(source.random() for _ in range(3))]


def _draw_numpy(source: Any) -> list[float]:
    return [float(source.standard_normal()), *map(float, source.random_sample(3))]


def _draw_named(generator: Generator) -> list[Any]:
    if isinstance(generator, torch.Generator):
        device = generator.device
        normal = torch.randn(2, generator=generator, device=device)
        return [*normal.tolist(), *torch.rand(3, generator=generator, device=device).tolist()]
    if isinstance(generator, random.Random):
        return _draw_python(generator)
    half = int(generator.integers(2**32, dtype=np.uint32))  # half a word may wait in the state
    return [half, float(generator.standard_normal()), *map(float, generator.random(3))]


def _plan(path: str, node: JSON, set_state: Callable[[Any], Any]) -> _Setter:
    return _setter(path, decode_tree(node), set_state)


def _setter(path: str, state: Any, set_state: Callable[[Any], Any]) -> _Setter:
    def setter() -> None:
        try:
            set_state(state)
        except Exception as error:  # whatever a forged state makes a generator raise
            raise _no_state(path, str(error)) from error

    return setter


def _plan_numpy(node: JSON) -> _Setter:
    state = decode_tree(node)
    if not isinstance(state, dict) or "bit_generator" not in state:
        raise _no_state("rng/numpy", "it names no bit generator")
    saved = str(state["bit_generator"])
    found = str(_numpy_state()["bit_generator"])
    _check_kind("rng/numpy", saved, found)
    return _plan("rng/numpy", node, np.random.set_state)


def _no_state(path: str, why: str) -> CorruptFileError:
    return CorruptFileError(
        f"The saved state of {path} isn't one: {why}.",
        next_step="Verify the generation, or use another.",
        path=path,
    )
