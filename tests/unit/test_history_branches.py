"""Curves that share a beginning, compared from where they part; who came from whom."""

from __future__ import annotations

from typing import Any

from dist_ckpt.history import compare_branches, trace_lineage

SHARED = [(step, 1.0) for step in range(1, 11)]


def test_branches_are_compared_over_the_steps_that_all_have() -> None:
    """A11, and case 50: a loss that isn't finite counts in no mean."""
    one = [*SHARED, (11, 0.5), (12, None), (13, 0.25), (14, 0.1)]
    two = [*SHARED, (11, 0.75), (12, 0.1), (13, 0.125)]
    found = compare_branches([one, two])
    assert found.fork_step == 10
    assert [(w.first_step, w.last_step, w.lowest) for w in found.windows] == [
        (11, 11, 0),
        (12, 12, None),
        (13, 13, 1),
    ]
    assert found.whole is not None
    assert (found.whole.num_steps, found.whole.means, found.whole.lowest) == (2, (0.375, 0.4375), 0)


def test_equal_curves_and_one_that_ends_at_the_fork_have_nothing_to_compare() -> None:
    for other in (SHARED, [*SHARED, (11, 1.0)], []):
        found = compare_branches([SHARED, other])
        assert found.fork_step == (10 if other else None)
        assert (found.windows, found.whole) == ((), None)


def test_curves_without_a_common_beginning_are_compared_where_they_overlap() -> None:
    found = compare_branches([[(1, 1.0), (2, 1.0)], [(2, 0.5), (3, 0.5)]])
    assert found.fork_step is None
    assert found.whole is not None
    assert (found.whole.first_step, found.whole.num_steps, found.whole.lowest) == (2, 1, 1)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, **fields}


def test_a_generation_has_the_past_that_its_training_went_through() -> None:
    lineage = trace_lineage(
        [
            event("forked", step=0, id="f"),
            event("resumed", step=0, id="f"),
            event("saved", step=2, id="a"),
            event("saved", step=4, id="b"),
            event("rewound", step=2),
            event("resumed", step=2, id="a"),
            event("saved", step=4, id="c"),
            event("fresh_start"),
            event("saved", step=1, id="d"),
            event("unreadable", step=None),
        ]
    )
    assert lineage.is_past_of("f", "b")
    assert lineage.is_past_of("a", "c")
    assert not lineage.is_past_of("b", "c")
    assert not lineage.is_past_of("c", "d")
    assert all(lineage.owns(id_) for id_ in "fabcd")
    assert not lineage.owns("x")
