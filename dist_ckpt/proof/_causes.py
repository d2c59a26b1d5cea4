"""The first difference in words, and what it says of the script. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dist_ckpt.proof._first import DRAWS, INPUTS, LOSS, RATES, STATE, STEP, First
from dist_ckpt.proof._tracks import Track

__all__ = ["describe_first", "explain"]

_SHOWN = 6


def describe_first(first: First) -> str:
    """Return where the first difference is, in one sentence without a full stop."""
    if first.kind == STEP:
        want, have = first.shown[STEP]
        return f"the scenario began at step {have}, not at step {want}"
    number = first.step + 1
    words = {DRAWS: f"in step {first.step}", STATE: f"after step {first.step}"}
    where = words.get(first.kind, f"of step {first.step}")
    if first.kind == RATES:
        where = f"of step {number}"
    elif first.at_start:
        where = f"before step {number}"
    others = [_name(first, kind) for kind in list(first.kinds)[1:]]
    also = f" ({', '.join(others)} too)" if others else ""
    rank = f" on rank {first.rank}" if first.rank else ""
    return f"the first difference is in {_name(first, first.kind)} {where}{rank}{also}"


def _name(first: First, kind: str) -> str:
    names = first.kinds[kind]
    if kind == DRAWS:
        return f"the draws of {_and(names)}"
    if kind == STATE:
        return f"the state of {_and(names)}"
    if kind == INPUTS:
        return "the place in the data" if first.at_start else "the inputs"
    return f"the {kind}"


def explain(
    first: First, found: Sequence[Track], expected: Sequence[Track], *, opened_at: int
) -> str:
    """Return the cause, as well as it can be told, in one or two sentences.

    Args:
        first: Between the continuous run and this scenario.
        found: The scenario's tracks.
        expected: The continuous run's tracks.
        opened_at: Where the scenario began; 0: two fresh starts.
    """
    if first.kind == STEP:
        return (
            "The script doesn't resume: it removes what is there, trains in another directory than "
            "the Checkpointer's, or goes back by resume=."
        )
    if opened_at == 0:
        return _between_fresh_starts(first)
    if first.at_start:
        return _at_the_start(first, found[first.rank], expected[first.rank])
    sentence = _in_a_step(first, found, opened_at)
    hints = _strays(found[first.rank].strays, first.kind)
    return f"{sentence} {hints}" if hints else sentence


def _between_fresh_starts(first: First) -> str:
    start = "Two fresh starts of the same command already differ, no resume being involved: "
    if first.at_start:
        return (
            f"{start}the script doesn't seed {_and(first.kinds.get(DRAWS, ()) or ('everything',))} "
            "before it builds the model and the data."
        )
    if INPUTS in first.kinds:
        return f"{start}the order of its data isn't fixed by a seed."
    if DRAWS in first.kinds:
        return f"{start}how much {_and(first.kinds[DRAWS])} draws isn't the same in each run."
    return (
        f"{start}an operation isn't deterministic (see torch.use_deterministic_algorithms), or the "
        "step reads a clock, an unseeded generator, the order of a set."
    )


def _at_the_start(first: First, found: Track, expected: Track) -> str:
    number = first.step + 1
    if first.kind == INPUTS:
        return (
            f"The script moves its data between the resume and step {number}, or the data's "
            "load_state_dict() doesn't take over what state_dict() told."
        )
    if first.kind == DRAWS:
        return "The script seeds or draws after the resume, outside what is saved."
    if first.kind == RATES:
        return (
            f"The script sets the learning rate between the resume and step {number}: what was "
            "restored is overwritten."
        )
    tensors = _tensors_of(expected, found)
    about = f" ({_and(tensors)})" if tensors else ""
    return (
        f"The script changes {_and(first.kinds[STATE])}{about} between the resume and step "
        f"{number}, or load_state_dict() doesn't take over what state_dict() told."
    )


def _tensors_of(expected: Track, found: Track) -> list[str]:
    if expected.end is None or found.start is None or expected.end["step"] != found.opened_at:
        return []
    want, have = expected.end["tensors"], found.start["tensors"]
    return [key for key in {**want, **have} if want.get(key) != have.get(key)]


def _in_a_step(first: First, found: Sequence[Track], opened_at: int) -> str:
    is_first = first.step == opened_at + 1
    when = "right after the resume" if is_first else "after the resume"
    if INPUTS in first.kinds:
        return (
            f"The script rewinds, rebuilds or skips its data {when}, or the data's state_dict() "
            "doesn't hold all that decides what comes next."
        )
    if DRAWS in first.kinds:
        return (
            f"The script seeds or draws after the resume, outside what is saved: {when} "
            f"{_and(first.kinds[DRAWS])} isn't where it is in the run without a cut."
        )
    if LOSS in first.kinds:
        return (
            "Inputs, learning rate, draws and all saved state were the same before it: the step "
            "depends on something that isn't saved (a generator of its own, a counter, a cache), "
            "or an operation isn't deterministic."
        )
    return _in_what_is_left(first, found, is_first=is_first)


def _in_what_is_left(first: First, found: Sequence[Track], *, is_first: bool) -> str:
    """Inputs, draws and loss are the same."""
    if first.kind == RATES:
        return "What sets the learning rate isn't given to the Checkpointer, or counts anew."
    if is_first and _is_reordered(found):
        return (
            f"No fault of the resume: on {found[0].world_size} ranks DistributedDataParallel sums "
            "gradients in other buckets from its second backward on, and a new process has its "
            "first again. The loss of the first step is the same, so the state was restored. "
            "Call dist_ckpt.rehearse() before the loop, at every start; with "
            "find_unused_parameters=True the buckets stay as they are."
        )
    words = first.kinds[STATE]
    if set(words) <= {"model", "buffers", "optimizer"}:
        return (
            "The loss was the same, so the forward pass was: the update wasn't. Gradients that "
            "were pending at the cut aren't saved, nor is state that a hook keeps; or backward "
            "isn't deterministic."
        )
    return f"Something that {_and(words)} depends on isn't saved."


def _is_reordered(found: Sequence[Track]) -> bool:
    start = found[0].start
    return found[0].world_size > 2 and start is not None and bool(start["reordered"])


def _strays(strays: Sequence[Mapping[str, str]], kind: str) -> str:
    wanted = {RATES: "scheduler", LOSS: "generator", INPUTS: "generator"}.get(kind)
    names = [f"{one['where']} ({one['type']})" for one in strays if one["kind"] == wanted]
    if not names:
        return ""
    argument = "scheduler=" if wanted == "scheduler" else "generators="
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"Not given to the Checkpointer: {', '.join(names[:_SHOWN])}{more}; see {argument}."


def _and(names: Sequence[Any]) -> str:
    words = [str(name) for name in names]
    if len(words) > _SHOWN:
        words = [*words[:_SHOWN], f"{len(words) - _SHOWN} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
