"""Losses as a page carries them, and as lines of text."""

from __future__ import annotations

import base64
import math
import random
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt.history import LossEntry
from dist_ckpt.report import Curve, Panel, draw_panels, encode_curve


def decode(curve: Curve) -> list[tuple[int, float]]:
    """Read a curve back by the words of the module's docstring, without its code."""
    data = zlib.decompress(base64.b64decode(curve.data))
    count = curve.count
    assert len(data) == (8 + curve.planes) * count
    deltas = struct.unpack(f"<{count}d", data[: 8 * count])
    planes = [data[(8 + p) * count : (9 + p) * count] for p in range(curve.planes)]
    entries, step = [], 0
    for place, delta in enumerate(deltas):
        step += int(delta)
        most_significant_first = bytes(plane[place] for plane in planes).ljust(8, b"\0")
        entries.append((step, struct.unpack(">d", most_significant_first)[0]))
    return entries


def float32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def noisy(count: int) -> list[LossEntry]:
    chance = random.Random(3)
    return [(step, 2 + chance.gauss(0, 0.1)) for step in range(1, count + 1)]


@given(st.lists(st.tuples(st.integers(0, 2**53), st.floats(allow_nan=False, allow_infinity=False))))
def test_every_bit_and_every_step_comes_back(entries: list[LossEntry]) -> None:
    curve = encode_curve(entries)
    assert (curve.count, curve.is_exact) == (len(entries), True)
    # 0.0 and -0.0 are told apart, too.
    assert [(step, repr(loss)) for step, loss in decode(curve)] == [
        (step, repr(loss)) for step, loss in entries
    ]


def test_a_loss_that_is_not_finite_is_nan_in_a_page() -> None:
    curve = encode_curve([(1, None), (2, 1.5), (1, 7.0)], limit_chars=0)
    (first, loss), *rest = decode(curve)
    assert (first, rest) == (1, [(2, 1.5), (1, 7.0)])
    assert math.isnan(loss)


def test_float32_losses_stay_exact_where_float64_ones_lose_their_last_digits() -> None:
    entries = noisy(4000)
    singles = [(step, float32(loss)) for step, loss in entries if loss is not None]
    limit = len(encode_curve(singles).data)
    narrow, wide = (encode_curve(found, limit_chars=limit) for found in (singles, entries))
    assert (narrow.is_exact, wide.is_exact) == (True, False)
    assert decode(narrow) == singles
    assert len(wide.data) <= limit
    digits = wide.to_json()["digits"]
    for (_, kept), (_, loss) in zip(decode(wide), entries, strict=True):
        assert loss is not None
        assert abs(kept - loss) < 10.0 ** (1 - digits)


@pytest.mark.parametrize("loss", [1.7976931348623157e308, -1.7976931348623157e308, 5e-324, 0.1])
def test_rounding_makes_no_number_infinite(loss: float) -> None:
    (_, kept), *_ = decode(encode_curve([(1, loss), *noisy(300)], limit_chars=0))
    assert kept == pytest.approx(loss, rel=1e-6, abs=1e-300)


# In a terminal


def test_a_curve_falls_from_its_first_label_to_its_last() -> None:
    lines = draw_panels([Panel("a", [(step, 10.0 - step) for step in range(11)])], width=40, rows=5)
    assert len(lines) == 7
    assert lines[0].split()[0] == "10"
    assert lines[4].split()[0] == "0"
    assert lines[-1].split() == ["0", "10"]
    drawn = [line[12:] for line in lines[:5]]
    starts = [len(line) - len(line.lstrip()) for line in drawn]
    assert starts == sorted(starts)
    assert starts[0] == 0
    assert len(drawn[4].rstrip()) == len(lines[5][12:])


def test_no_spike_is_thinned_away() -> None:
    entries: list[LossEntry] = [(step, 1.0) for step in range(100_000)]
    entries[50_001] = (50_001, 9.0)
    lines = draw_panels([Panel("a", entries)], width=60, rows=8)
    assert [line[12:].strip() != "" for line in lines[:8]] == [True] * 8


def test_curves_share_their_scales_and_lie_over_each_other_in_colours() -> None:
    panels = [Panel("one", [(0, 1.0), (9, 2.0)]), Panel("two", [(5, 3.0), (20, 4.0)])]
    apart = draw_panels(panels, width=50, rows=4)
    assert len(apart) == 2 * (1 + 4 + 2)
    assert [line.strip() for line in (apart[0], apart[7])] == ["one", "two"]
    assert apart[6].split() == apart[13].split() == ["0", "20"]
    over = draw_panels(panels, width=50, rows=4, colored=True)
    assert len(over) == 1 + 4 + 2
    assert "\x1b[36mone\x1b[0m" in over[0]
    assert all(line.count("\x1b[0m") >= line.count("\x1b[3") > 0 for line in over[1:5:3])


def test_nothing_to_draw_one_point_and_equal_losses_are_drawn_as_they_are() -> None:
    assert draw_panels([Panel("a", []), Panel("b", [(1, None)])], width=40) == []
    for entries in ([(7, 2.5)], [(1, 2.5), (2, 2.5)]):
        lines = draw_panels([Panel("a", entries)], width=40, rows=5)
        assert [line.split()[0] for line in lines[:5] if "2.5" in line] == ["2.5"]
    extreme: list[LossEntry] = [(0, -1.7e308), (1, 1.7e308)]
    assert len(draw_panels([Panel("a", extreme)], width=40, rows=5)) == 7


def test_a_terminal_without_braille_gets_stars() -> None:
    lines = draw_panels([Panel("a", noisy(50))], width=40, braille=False)
    assert "".join(lines).isascii()
    assert "*" in lines[3]
