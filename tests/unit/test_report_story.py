"""What a page makes of a journal."""

from __future__ import annotations

from typing import Any

from dist_ckpt.report._story import attempts_of, last_until, marks_of, replays_of


def event(name: str, attempt: int | None, step: int | None = None, **more: Any) -> dict[str, Any]:
    return {"time": 1000.0, "attempt": attempt, "event": name, "step": step, **more}


KILLED = [
    event("attempt_started", 1, pid=7, host="h", world_size=2),
    event("fresh_start", 1, 0),
    event("loop_started", 1, 0, until=900),
    event("saved", 1, 100, time=1050.0, blocked_secs=0.5),
    event("signal", 1, 150, signals=["SIGUSR1"], count=1),
    event("saved", 1, 150, time=1075.0, blocked_secs=0.25),
]
RESUMED = [
    event("attempt_started", 2, pid=8, host="h", world_size=2),
    event("resumed", 2, 150),
    event(
        "replayed", 2, 187, resumed_step=150, agreed=37, of=37, first_difference=None,
        complete=True, comparable=True,
    ),
    event("attempt_stopped", 2, 300, reason="SIGTERM"),
]  # fmt: skip


def test_attempts_are_told_from_their_start_to_their_end() -> None:
    first, second = attempts_of(KILLED + RESUMED)
    assert (first.start_step, first.saved, first.blocked_secs) == (0, 2, 0.75)
    assert (first.host, first.pid, first.world_size) == ("h", 7, 2)
    assert first.secs_per_step == 0.5
    assert (second.start_step, second.last_step) == (150, 300)
    assert (second.how, second.why) == ("stopped", "SIGTERM")


def test_a_killed_attempt_ends_where_the_next_ones_replay_does() -> None:
    first, _ = attempts_of(KILLED + RESUMED)
    assert (first.how, first.last_step) == (None, 187)
    (replay,) = replays_of(KILLED + RESUMED)
    assert (replay["resumed_step"], replay["num_logged"], replay["agreed"]) == (150, 37, 37)


def test_marks_stand_in_the_order_of_events() -> None:
    journal = [*KILLED, *RESUMED, event("pivot", 3, 300, policy="b.json"), event("rewound", 3, 200)]
    marks = marks_of(journal, attempts_of(journal), alive=True)
    assert [(mark.kind, mark.step) for mark in marks] == [
        ("signal", 150), ("crash", 187), ("pivot", 300), ("rewind", 200),
    ]  # fmt: skip
    assert marks[0].text == "SIGUSR1"
    assert marks[2].text == "pivot: policy b.json"


def test_what_commands_journal_is_marked_and_is_no_attempt() -> None:
    journal = [
        event("forked", 0, 100, run="parent", policy=False, id="x"),
        *KILLED,
        event("rewound", 2, 100, set_aside=[150], home="rewind_to_000100"),
    ]
    attempts = attempts_of(journal)
    assert [attempt.number for attempt in attempts] == [1]
    marks = marks_of(journal, attempts, alive=False)
    assert [(mark.kind, mark.step) for mark in marks] == [
        ("fork", 100), ("signal", 150), ("crash", 150), ("rewind", 100),
    ]  # fmt: skip
    assert marks[0].text == "forked: run parent"
    assert marks[3].text == "rewound: set aside 150, home rewind_to_000100"


def test_the_newest_attempt_has_crashed_only_when_it_is_known_to_be_over() -> None:
    attempts = attempts_of(KILLED)
    assert [mark.kind for mark in marks_of(KILLED, attempts, alive=True)] == ["signal"]
    assert [mark.kind for mark in marks_of(KILLED, attempts, alive=False)] == ["signal", "crash"]


def test_a_diverged_run_doesnt_fill_the_page_with_marks() -> None:
    journal = [event("loss_not_finite", 1, step, kind="nan") for step in range(5000)]
    assert attempts_of(journal) == []
    marks = marks_of(journal, attempts_of(journal), alive=True)
    assert len(marks) == 200


def test_the_end_of_the_loop_is_the_newest_attempts() -> None:
    assert last_until(KILLED) == 900
    assert last_until(KILLED + RESUMED) is None
    assert last_until([event("loop_started", 1, 0, until="soon")]) is None


def test_lines_that_make_no_sense_are_passed_over() -> None:
    journal = [
        {"event": "unreadable", "time": None, "attempt": None, "step": None},
        {},
        event("attempt_started", 1, pid="x", host=None),
        event("saved", 1, None, time="yesterday", blocked_secs="long"),
        event("resumed", 1, None),
        {"attempt": "x", "event": ["signal"], "step": "y"},
        event("signal", 1, None, signals=7),
        event("replayed", 1, None, resumed_step="a", of=None),
    ]
    (attempt,) = attempts_of(journal)
    assert (attempt.number, attempt.saved) == (1, 1)
    assert [mark.text for mark in marks_of(journal, [attempt], alive=True)] == ["7"]
    assert replays_of(journal) == []
