"""The live objects of a training, read as named tensors and values. Layer 3, no collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from dist_ckpt.capture._drift import Drift
from dist_ckpt.capture._gradients import encode_gradients
from dist_ckpt.capture._memory import NotedTensors
from dist_ckpt.capture._observed import Observed, observe
from dist_ckpt.capture._optim import (
    OptimizerStates,
    check_optimizer,
    encode_optimizer,
    label_of,
    read_states,
)
from dist_ckpt.capture._parts import (
    ExtraState,
    check_stateful,
    encode_stateful,
    named,
    state_of,
    stateful_kind,
    words_of,
)
from dist_ckpt.capture._rng import Generator, cuda_devices, draw_rng, encode_rng
from dist_ckpt.capture._sharding import placement_of
from dist_ckpt.capture._slots import Slots
from dist_ckpt.capture._tensors import SpecCache, dtype_name, list_tensors, predict_states
from dist_ckpt.capture._values import (
    LiveTensor,
    Stateful,
    Structure,
)
from dist_ckpt.capture._walk import ModelView, check_view, view_models
from dist_ckpt.capture._zero import inner_of, is_zero
from dist_ckpt.collecting import without_collection
from dist_ckpt.errors import UsageError
from dist_ckpt.slices import TensorSpec
from dist_ckpt.tree import JSON, encode_tree

__all__ = ["LiveObjects"]

PutTensor: TypeAlias = Callable[[str, torch.Tensor], JSON]

#: So many times a kept list may turn out to be stale; then none is kept any more.
_MOST_MISSES = 3


@dataclass(frozen=True)
class _Listing:
    """What one walk listed, and what it was made of."""

    observed: Observed
    view: ModelView
    states: OptimizerStates
    tensors: list[LiveTensor]


class LiveObjects:
    """The live objects; what can't be kept was refused at construction, by its path.

    Nothing is copied or changed until a restore. All methods run on the main thread, none is
    collective.

    Args:
        model: A module, or a dict of named ones, whose tensors are then called ``KEY.name``.
        optimizer: A torch optimizer, or a dict of named ones; no parameter may be in two of them.
        scheduler: One, or a dict of named ones, with ``state_dict`` and ``load_state_dict``.
        scaler: A GradScaler, or a dict of named ones.
        data: Where the data stand, with ``state_dict`` and ``load_state_dict``.
        policy: The user's policy, likewise.
        extra: Anything else of the user by name, likewise.
        generators: Generators of the program by name, kept with the global ones.

    Raises:
        UnsupportedValueError: Something can't be kept; ``path`` says where it lies.
        UsageError: An argument isn't what it must be.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        data: Stateful | None = None,
        policy: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        generators: Mapping[str, Generator] | None = None,
    ) -> None:
        self._models: dict[str, nn.Module] = named("model", model)
        self._optimizers: dict[str, Optimizer] = named("optimizer", optimizer)
        self._schedulers: dict[str, Stateful] = named("scheduler", scheduler)
        self._scalers: dict[str, Stateful] = named("scaler", scaler)
        self._generators: dict[str, Generator] = named("generators", generators or {})
        # In the order in which they are loaded: the data last, they may draw.
        self._holders: dict[str, Stateful] = {
            **words_of("extra", named("extra", extra or {})),
            **words_of("policy", {} if policy is None else {"": policy}),
            **words_of("data", {} if data is None else {"": data}),
        }
        self._specs = SpecCache()
        self._listing: _Listing | None = None
        self._marks: list[tuple[int, int]] | None = None
        self._misses = 0
        self._slots = Slots()
        self.notes: list[str] = []
        self.accepted: list[str] = []
        self._check()

    def _check(self) -> None:
        for key, model in self._models.items():
            if not isinstance(model, nn.Module):
                raise UsageError(
                    f"{label_of('model', key)} is a {type(model).__name__}, not a module.",
                    next_step="Give a torch.nn.Module, or a dict of named ones.",
                )
        for kind in ("model", "optimizer"):
            if not getattr(self, f"_{kind}s"):
                raise UsageError(f"There is no {kind}.", next_step=f"Give at least one {kind}.")
        for key, optimizer in self._optimizers.items():
            check_optimizer(key, optimizer)
        parts = (words_of("scheduler", self._schedulers), words_of("scaler", self._scalers))
        for word, value in {**parts[0], **parts[1], **self._holders}.items():
            check_stateful(word, value)
        view = self._view()
        check_view(view, self._models)
        self._drift = Drift(view)
        # Encoded once into nothing, so that what can't be kept is refused before training starts.
        self.tensors()
        self.shared_values()
        self.rank_values(lambda _path, _tensor: None)

    def _view(self) -> ModelView:
        # Walked anew each time (1 ms for 1,000 parameters): buffers are replaced, modules added.
        return view_models(self._models)

    def _states(self, view: ModelView) -> OptimizerStates:
        return read_states(self._optimizers, view)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return every parameter by name in canonical order; of tied ones the first name counts."""
        return dict(self._view().parameters)

    def aliases(self) -> dict[str, str]:
        """Return each other name of a tied parameter or buffer → the name that is kept."""
        return dict(self._look()[0].aliases)

    def structure(self) -> Structure:
        """Return names, dtypes, shapes and ties of parameters and persistent buffers."""
        view = self._view()
        parameters, buffers = (
            tuple((name, dtype_name(item.dtype), tuple(item.shape)) for name, item in group.items())
            for group in (view.parameters, view.buffers)
        )
        return Structure(parameters, buffers, tuple(view.aliases.items()))

    @without_collection()
    def tensors(self) -> list[LiveTensor]:
        """Return every tensor of this instant, sharing memory with the live objects.

        The order is fixed: weights, ``exp_avg``, ``exp_avg_sq`` (each in canonical order), other
        optimizer tensors, persistent buffers. Frozen parameters are weights, too. The very list of
        the last call is returned where nothing has moved since the last two.

        Raises:
            UnsupportedValueError: A tensor that came up since construction and can't be kept.
        """
        objects = observe(self._models, self._optimizers)
        known = self._listing
        if known is not None:
            if known.observed.has_same_objects(objects) and known.observed.lies_as_before():
                return known.tensors
            self._listing = None
            self._misses += 1
        view = self._view()
        states = self._states(view)
        tensors = list_tensors(view, states, self._specs)
        self._keep(_Listing(self._observed(objects, view, states), view, states, tensors))
        return tensors

    def _keep(self, listing: _Listing) -> None:
        """Keep a listing where its tensors have stayed for once, as far as their addresses tell.

        It holds on to their memory: of an optimizer that makes new moments at each step that would
        be the old ones, until the next save.
        """
        marks = listing.observed.marks()
        if listing.observed.is_whole and marks == self._marks and self._misses < _MOST_MISSES:
            self._listing = listing
        self._marks = marks

    def _observed(self, objects: list[Any], view: ModelView, states: OptimizerStates) -> Observed:
        listed: list[torch.Tensor] = [*view.parameters.values(), *view.buffers.values()]
        has_trees = False
        for state in states.by_param.values():
            listed += state.tensors.values()
            has_trees |= state.tree is not None  # its inside isn't observed
        return Observed([] if has_trees else objects, listed)

    def _look(self) -> tuple[ModelView, OptimizerStates]:
        """Return what the objects are called now: by the last listing if they are the same ones."""
        known = self._listing
        if known is not None and known.observed.has_same_objects(
            observe(self._models, self._optimizers)
        ):
            return known.view, known.states
        view = self._view()
        return view, self._states(view)

    def predicted_tensors(self) -> list[TensorSpec] | None:
        """Return the specs of `tensors` after the first update, or None if that can't be told.

        It can for Adam, AdamW, their subclasses, and SGD; and for any optimizer that has its state.
        """
        view = self._view()
        states = predict_states(view, self._states(view), self._optimizers)
        if states is None:
            return None
        return [live.spec for live in list_tensors(view, states, SpecCache(check=False))]

    def only_steps_change_weights(self) -> bool:
        """Return whether nothing in the modules themselves changes what optimizers update.

        False where a module renormalises its own weights in forward (``max_norm``).
        """
        return all(
            getattr(module, "max_norm", None) is None
            for model in self._models.values()
            for module in model.modules()
        )

    def stateless(self) -> list[str]:
        """Return the parameters that have no optimizer state now, in canonical order."""
        view = self._view()
        states = self._states(view)
        return [name for name in view.parameters if name not in states.by_param]

    def shared_values(self) -> dict[str, JSON]:
        """Return what is meant to be the same on every rank, as JSON.

        Parts and their kinds, optimizers (groups, and state that isn't a tensor), schedulers,
        scalers.
        """
        view, states = self._look()
        return {
            "parts": self._parts(view),
            "optimizers": {
                key: encode_optimizer(key, optimizer, view, states)
                for key, optimizer in self._optimizers.items()
            },
            "ties": states.ties,
            "schedulers": {
                word: encode_stateful(word, item)
                for word, item in words_of("scheduler", self._schedulers).items()
            },
            "scalers": {
                word: encode_stateful(word, item)
                for word, item in words_of("scaler", self._scalers).items()
            },
        }

    def parts(self) -> dict[str, str | None]:
        """Return the word of each part besides the model → its kind, None where that says nothing.

        As ``shared_values()["parts"]``: ``optimizer``, ``scheduler``, ``extra.ema``, ``data``.
        """
        return self._parts(self._view())

    def parallelism(self) -> list[str]:
        """Return how tensors are divided among ranks, for people, sorted; empty where nothing is.

        Each kind of wrapper once, and each way in which a parameter is placed.
        """
        view = self._view()
        kinds = {type(m).__name__ for model in self._models.values() for m in model.modules()}
        found = kinds & {"DistributedDataParallel"}
        found |= {type(o).__name__ for o in self._optimizers.values() if is_zero(o)}
        placed = {placement_of(parameter) for parameter in view.parameters.values()}
        return sorted(found | {text for text in placed if text is not None})

    def _parts(self, view: ModelView) -> dict[str, str | None]:
        scalers = words_of("scaler", self._scalers)
        optimizers = {k: type(inner_of(o)).__name__ for k, o in self._optimizers.items()}
        return {
            **words_of("optimizer", optimizers),
            **words_of("scheduler", {k: stateful_kind(s) for k, s in self._schedulers.items()}),
            **{w: "enabled" if state_of(w, s) else "disabled" for w, s in scalers.items()},
            **dict.fromkeys(self._all_holders(view)),
            **dict.fromkeys(words_of("generators", self._generators)),
        }

    def _all_holders(self, view: ModelView) -> dict[str, Stateful]:
        modules = {key: ExtraState(module) for key, module in view.extra_state.items()}
        return {**words_of("extra_state", modules), **self._holders}

    def rank_values(self, put_tensor: PutTensor) -> dict[str, JSON]:
        """Return this rank's own values as JSON.

        Random numbers, data, policy, extra, modules' extra state, and which parameters have a
        gradient.

        Args:
            put_tensor: Called with a unique path and each tensor (any device; a view that is read
                at once or copied); what it returns is given to ``get_tensor`` by `load_rank`.
        """
        values = {}
        view, states = self._look()
        noted = NotedTensors(put_tensor)
        for word, holder in self._all_holders(view).items():
            path = word.replace(".", "/", 1)
            state = state_of(word, holder)
            with without_collection():
                values[word] = encode_tree(state, path=path, put_tensor=noted.put)
        with without_collection():
            noted.finish()
        rng = encode_rng(self._generators, self._cuda_devices(view))
        gradients = encode_gradients(view, states)
        return {"rng": rng, "values": values, **({"gradients": gradients} if gradients else {})}

    def rng_draws(self) -> dict[str, list[Any]]:
        """Return the next draws of every generator; they are put back, nothing has moved."""
        return draw_rng(self._generators, self._cuda_devices(self._view()))

    def _cuda_devices(self, view: ModelView) -> frozenset[int]:
        return cuda_devices(chain(view.parameters.values(), view.buffers.values()))
