"""The live objects of a training, read and put back. Layer 3, no I/O, no collective."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import torch

from dist_ckpt.capture._fit import StatePlan, check_groups, is_kin, load_groups, names_of
from dist_ckpt.capture._gradients import restore_gradients
from dist_ckpt.capture._live import LiveObjects
from dist_ckpt.capture._memory import MadeTensors
from dist_ckpt.capture._optim import label_of
from dist_ckpt.capture._parts import (
    check_parts,
    load_stateful,
    words_of,
)
from dist_ckpt.capture._rng import restore_rng
from dist_ckpt.capture._sharding import check_held
from dist_ckpt.capture._tensors import dtype_name
from dist_ckpt.capture._values import (
    Mismatches,
    TensorLike,
    is_accepted,
)
from dist_ckpt.capture._walk import ModelView
from dist_ckpt.tree import JSON, decode_tree

__all__ = ["Captured"]

GetTensor: TypeAlias = Callable[[JSON], torch.Tensor]


class Captured(LiveObjects):
    """The live objects, read as `LiveObjects` does, and put back.

    A restore is `prepare`, the tensors read into what it returned, `load_shared`, `load_rank`, and
    last, after all that draws, `load_gradients` and `load_rng`. ``notes`` then says what was left
    as it is here, ``accepted`` which parts differ.
    """

    def prepare(
        self,
        keys: Mapping[str, TensorLike],
        stateless: Sequence[str],
        shared: JSON,
        *,
        accept: Collection[str] = (),
        omit: Collection[str] = (),
        elsewhere: Collection[str] = (),
        tied: Mapping[str, str] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Optimizer state exists where it was saved and nowhere else, its values yet to be read.

        Missing state is allocated beside its parameter, never made by a step. State that isn't a
        tensor has its saved values. A buffer that was saved and is None here is allocated, too.

        Args:
            keys: Every saved tensor's key → its dtype and shape.
            stateless: Parameters saved without optimizer state.
            shared: What `shared_values` returned.
            accept: Parts whose difference is accepted, as ``"scaler"``, ``"extra.ema"``.
            omit: Parts that stay as they are here, as ``"optimizer"``, whatever was saved.
            elsewhere: Names of parameters and buffers that other ranks have and this one hasn't
                (pipeline stages): what was saved of them is passed over.
            tied: Each further key of a saved tensor → its key in ``keys``.

        Returns:
            Each key → the live tensor to be filled; any device, maybe not contiguous. Of a DTensor
            this rank fills its part. What this rank doesn't hold is left out.

        Raises:
            MismatchError: Names, shapes, dtypes, groups or parts differ. Nothing has changed then.
        """
        self._slots.clear()  # a generation that turned out faulty may have had others
        view = self._view()
        states = self._states(view)
        found = Mismatches()
        made = self._slots.make(view, keys, self._specs.component, tied or {})
        targets = self._match_model(view, keys, found, frozenset(elsewhere), made)
        anew = self._begun_anew(shared, accept, omit)
        self._check_shared(view, shared, found, accept, omit, anew=anew, elsewhere=elsewhere)
        plan = StatePlan(
            self._optimizers,
            view,
            states.without(anew),
            {key: entry for key, entry in shared["optimizers"].items() if key not in anew},
            shared["ties"],
            elsewhere={*elsewhere, *names_of(shared["optimizers"], anew, view)},
        )
        for key, spec in keys.items():
            if key.startswith("optimizer/"):
                plan.add(key, spec)
        plan.check(stateless, found)
        found.raise_if_any()
        targets.update(plan.build())
        plan.apply()
        self._slots.fill()
        return targets

    def _check_shared(
        self,
        view: ModelView,
        shared: JSON,
        found: Mismatches,
        accept: Collection[str],
        omit: Collection[str],
        *,
        anew: Collection[str],
        elsewhere: Collection[str],
    ) -> None:
        for key, optimizer in self._optimizers.items():
            if key in shared["optimizers"] and key not in anew:
                saved = shared["optimizers"][key]
                check_groups(key, saved, optimizer, view, found, elsewhere=elsewhere)
        check_parts(shared["parts"], self._parts(view), found, accept=accept, omit=omit)

    def _begun_anew(
        self, shared: JSON, accept: Collection[str], omit: Collection[str]
    ) -> dict[str, bool]:
        """Return the optimizers that take nothing of what was saved → whether that was accepted.

        They are left out, or somebody has accepted that another one was saved.
        """
        saved, live = shared["optimizers"], self._optimizers
        words = {key: label_of("optimizer", key) for key in (*saved, *live)}
        anew = {key: False for key, word in words.items() if is_accepted(word, omit)}
        for key in live.keys() & saved.keys() - anew.keys():
            if is_accepted(words[key], accept) and not is_kin(saved[key]["kind"], live[key]):
                anew[key] = True
        return anew

    def _match_model(
        self,
        view: ModelView,
        keys: Mapping[str, TensorLike],
        found: Mismatches,
        elsewhere: Collection[str],
        made: Mapping[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        live = {
            f"model/{self._specs.component(name)}": tensor
            for group in (view.parameters, view.buffers)
            for name, tensor in group.items()
        } | dict(made)
        kept = {
            f"model/{self._specs.component(other)}": f"model/{self._specs.component(name)}"
            for other, name in view.aliases.items()
        }
        others = {f"model/{self._specs.component(name)}" for name in elsewhere}
        targets: dict[str, torch.Tensor] = {}
        filled = set()
        for key, spec in keys.items():
            if not key.startswith("model/"):
                continue
            place = kept.get(key, key)
            tensor = live.get(place)
            if tensor is None:
                if place not in others:
                    found.unexpected.append(key)
                continue
            if place in filled:
                found.differ(key, "on its own", f"tied to {place}")
            filled.add(place)
            check_held(tensor, key)
            here = (dtype_name(tensor.dtype), tuple(tensor.shape))
            if here != (spec.dtype, tuple(spec.shape)):
                found.differ(key, f"{spec.dtype} {tuple(spec.shape)}", f"{here[0]} {here[1]}")
            targets[key] = tensor.detach()
        found.missing += [place for place in live if place not in filled]
        return targets

    def load_shared(
        self,
        shared: JSON,
        *,
        accept: Collection[str] = (),
        omit: Collection[str] = (),
        elsewhere: Collection[str] = (),
    ) -> None:
        """Groups, schedulers and scalers hold their saved values.

        Groups are filled last and in place: the next learning rate is the saved one, in whatever
        order scheduler and optimizer were built.

        Raises:
            MismatchError: A part differs that isn't accepted, or groups do. Nothing has changed
                then.
        """
        view = self._view()
        found = Mismatches()
        saved, live = shared["parts"], self._parts(view)
        anew = self._begun_anew(shared, accept, omit)
        self._check_shared(view, shared, found, accept, omit, anew=anew, elsewhere=elsewhere)
        found.raise_if_any()
        self.accepted += found.accepted
        parts = {
            **words_of("scheduler", self._schedulers),
            **words_of("scaler", self._scalers),
        }
        states = {**shared["schedulers"], **shared["scalers"]}
        for word, part in parts.items():
            is_same = word in states and saved.get(word) == live[word]
            if is_same and not is_accepted(word, omit):
                load_stateful(word, part, decode_tree(states[word]["state"]))
        for key, optimizer in self._optimizers.items():
            label = label_of("optimizer", key)
            if key not in anew:
                entry = shared["optimizers"][key]
                self.notes += load_groups(key, entry, optimizer, view, elsewhere)
                if saved[label] != live[label]:
                    self.notes.append(f"{label} goes on with the saved state and settings")
            elif anew[key]:
                self.notes.append(f"{label} begins anew, with the settings it was built with")
                self.notes += [
                    f"{word} goes on with what was saved, base_lrs too: it sets the rate from them"
                    for word, part in words_of("scheduler", self._schedulers).items()
                    if getattr(part, "optimizer", None) is optimizer and saved.get(word)
                ]

    def begin(self) -> None:
        """Training begins: note what `drifted` compares with."""
        self._drift.begin(self._view())

    def drifted(self) -> list[str]:
        """Return what has changed since `begin` that no resume brings back, as warnings."""
        return self._drift.warnings(self._view())

    def load_rank(
        self,
        values: JSON,
        get_tensor: GetTensor,
        *,
        accept: Collection[str] = (),
        omit: Collection[str] = (),
    ) -> None:
        """Modules' extra state, ``extra``, policy and data hold their saved values, RNG not yet.

        Args:
            values: What `rank_values` returned.
            get_tensor: Returns the tensor (on the CPU, its own memory: the object may keep it) for
                what ``put_tensor`` returned.
            accept: As for `prepare`.
            omit: As for `prepare`.

        Raises:
            MismatchError: A part is missing on one side. Nothing has changed then.
        """
        found = Mismatches()
        holders = self._all_holders(self._view())
        saved = values["values"]
        parts = (dict.fromkeys(saved), dict.fromkeys(holders))
        check_parts(*parts, found, accept=accept, omit=omit)
        found.raise_if_any()
        self.accepted += found.accepted
        words = [word for word in holders if word in saved and not is_accepted(word, omit)]
        made = MadeTensors([saved[word] for word in words], get_tensor)
        states = {word: decode_tree(saved[word], get_tensor=made.get) for word in words}
        for word, state in states.items():
            load_stateful(word, holders[word], state)

    def load_gradients(self, values: JSON) -> None:
        """Parameters that had a gradient have one of zeros, so that the next step updates them too.

        To be called last, after rehearsals, which want none.

        Args:
            values: What `rank_values` returned.
        """
        view = self._view()
        restore_gradients(values.get("gradients", {}), view, self._states(view))

    def load_rng(self, values: JSON, *, accept: Collection[str] = ()) -> None:
        """Every generator goes on where it was when saved; to be called last, after all that draws.

        Raises:
            MismatchError: A generator is missing on one side, or of another kind. Nothing has
                changed then.
        """
        found = Mismatches()
        saved, live = values["rng"]["named"], self._generators
        words = [dict.fromkeys(words_of("generators", names)) for names in (saved, live)]
        check_parts(words[0], words[1], found, accept=accept)
        found.raise_if_any()
        skip = {name for name in live if is_accepted(f"generators.{name}", accept)}
        devices = self._cuda_devices(self._view())
        self.notes += restore_rng(values["rng"], live, devices, skip=skip)
