"""The loss file: format, repair, canonical reading, and what an append costs."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt import storage
from dist_ckpt.errors import CorruptFileError, StorageError, UsageError
from dist_ckpt.history import MISSING, LossEntry, LossFile, _loss_format, canonical, parse_loss
from dist_ckpt.history._loss_format import CanonicalIndex, encode_entry, scan_loss

WHOLE = b"[\n[1, 2.5],\n[2, null],\n[3, 0.1]]"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.loss.json"


def reopened(path: Path) -> LossFile:
    file = LossFile.open(path)
    file.close()
    return file


class CountedOps(storage.Ops):
    """Counts the system calls and bytes of writes and reads; fails or tears a write when told."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.read = 0
        self.tear_after: int | None = None
        self.torn = 0

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:  # type: ignore[override]
        if self.tear_after is not None:
            self.torn += 1
            if self.torn > 1:
                self.tear_after = None
                raise OSError(28, os.strerror(28))
            return super().pwrite(fd, data[: self.tear_after], offset)
        self.written.append(len(data))
        return super().pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        done = super().preadv(fd, buffers, offset)
        self.read += done
        return done


@pytest.fixture
def ops() -> Iterator[CountedOps]:
    counted = CountedOps()
    with storage.use_ops(counted):
        yield counted


def test_a_new_file_is_an_empty_array_private_to_the_user(path: Path) -> None:
    reopened(path)
    assert path.read_bytes() == b"[]"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_bytes_are_valid_json_after_every_append_and_old_ones_stay(path: Path) -> None:
    file = LossFile.open(path)
    before = path.read_bytes()
    for step, loss in [(1, 2.5), (2, math.nan), (3, 0.1)]:
        file.append(step, loss)
        data = path.read_bytes()
        assert len(json.loads(data)) == step
        assert data.startswith(before[:-1])
        before = data
    assert before == WHOLE
    file.close()


def test_an_append_is_one_write_at_the_closing_bracket(path: Path, ops: CountedOps) -> None:
    file = LossFile.open(path)
    ops.written.clear()
    file.append(1, 2.5)
    file.append(2, 2.25)
    assert ops.written == [len(b"\n[1, 2.5]]"), len(b",\n[2, 2.25]]")]
    file.close()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_comes_back_bit_for_bit(loss: float) -> None:
    data = b"[" + encode_entry(1, loss) + b"]"
    ((_, back),) = parse_loss(data, path="x")
    assert back is not None
    assert back.hex() == loss.hex()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_not_finite_is_null(path: Path, loss: float | None) -> None:
    """Case 50: a NaN in a metric blocks every later checkpoint."""
    file = LossFile.open(path)
    file.append(1, loss)
    file.append(2, 1.0)
    assert file.get(1) == (1, None)
    file.close()
    assert json.loads(path.read_bytes(), parse_constant=pytest.fail) == [[1, None], [2, 1.0]]
    assert reopened(path).entries() == [(1, None), (2, 1.0)]


@pytest.mark.parametrize("step", [-1, 2**63])
def test_a_step_that_is_none_is_refused_and_nothing_is_written(path: Path, step: int) -> None:
    file = LossFile.open(path)
    with pytest.raises(UsageError):
        file.append(step, 1.0)
    file.close()
    assert path.read_bytes() == b"[]"


@pytest.mark.parametrize("kept", range(len(WHOLE)))
@pytest.mark.parametrize("tail", [b"", b"\0" * 9, b",\n[4", b"]]]]", b"\xff\xfe garbage ["])
def test_a_torn_append_is_repaired_on_opening(path: Path, kept: int, tail: bytes) -> None:
    """Every prefix, alone and with what a power cut may leave behind it."""
    data = WHOLE[:kept] + tail
    path.write_bytes(data)
    if not data.strip(b"\0"):
        reopened(path)
        assert path.read_bytes() == b"[]"
        return
    if not data.startswith(b"["):
        with pytest.raises(CorruptFileError):
            LossFile.open(path)
        assert path.read_bytes() == data
        return
    entries, end = longest_valid_beginning(data)
    file = reopened(path)
    assert path.read_bytes() == data[:end] + b"]"
    assert json.loads(path.read_bytes()) == entries
    assert file.num_entries == len(entries)
    was_whole = data == WHOLE
    assert file.repaired == (0 if was_whole else len(data) - end)


def longest_valid_beginning(data: bytes) -> tuple[list[list[float | None]], int]:
    """The slow truth: try every length, closed by a bracket, from the longest down."""
    for end in range(len(data), 0, -1):
        # A bracket put after white space or a comma would be valid, or not, as before it.
        if data[end - 1 : end] not in (b"[", b"]"):
            continue
        try:
            entries = json.loads(data[:end] + b"]")
        except ValueError:
            continue
        if all(
            isinstance(entry, list)
            and len(entry) == 2
            and type(entry[0]) is int
            and type(entry[1]) in (int, float, type(None))
            for entry in entries
        ):
            return entries, end
    raise AssertionError(data)


LONG = b"[" + b",".join(b"\n[%d, %d.5]" % (step, step) for step in range(12)) + b"]"


@given(
    st.lists(st.tuples(st.integers(1, len(LONG) - 1), st.sampled_from(b"\0],[ {9")), min_size=1),
    st.integers(1, len(LONG)),
    st.sampled_from([b"", b"\0\0", b"]]]]]]"]),
)
def test_damage_anywhere_keeps_the_longest_valid_beginning_and_what_is_whole_behind_it(
    damage: list[tuple[int, int]], kept: int, tail: bytes
) -> None:
    data = bytearray(LONG)
    for position, byte in damage:
        data[position] = byte
    torn = bytes(data[:kept]) + tail
    with contextlib.suppress(ValueError):
        json.loads(torn)
        return  # whole, whether ours or not: no question of a beginning
    entries, end = longest_valid_beginning(torn)
    behind = whole_lines_behind(torn, end)
    steps, losses, scan = scan_loss(torn, path="x")
    found: list[list[float | None]] = [list(pair) for pair in zip(steps, losses, strict=True)]
    assert without_repetitions(found) == without_repetitions(entries + behind)
    assert (scan.end, scan.whole, scan.mended is not None) == (end, False, bool(behind))
    if scan.mended is not None:
        assert json.loads(scan.mended.data + b"]") == found
        assert scan.mended.data.startswith(torn[:end])
        assert scan.mended.num_behind == len(behind)


def item_in_front(data: bytes) -> tuple[list[float | None], int] | None:
    """The entry that these bytes begin with, and where it ends."""
    match = re.match(rb" *(\[ *\d+ *, *(?:\d+(?:\.\d+)?) *\])", data)
    with contextlib.suppress(ValueError):  # 0 before another digit isn't JSON
        return match and (json.loads(match[1]), match.end())
    return None


def whole_lines_behind(data: bytes, end: int) -> list[list[float | None]]:
    """The slow truth: each line that begins with an entry, until damage holds a NUL byte.

    Not one that stands inside an entry, where a space would do: that is one bad bit.
    """
    entries = []
    stop = end
    for start in (i + 1 for i in range(end, len(data)) if data[i : i + 1] == b"\n"):
        found = item_in_front(data[start:])
        if found is None:
            continue
        damage = data[stop:start].strip(b",\n")
        mended = item_in_front(damage.replace(b"\0", b" "))
        is_one_bit = damage.count(b"\0") == 1 and damage[:1] != b"\0"
        if b"\0" in damage and not (is_one_bit and mended and mended[1] == len(damage)):
            break
        entries.append(found[0])
        stop = start + found[1]
    return entries


def without_repetitions(entries: list[list[float | None]]) -> list[list[float | None]]:
    return [entry for i, entry in enumerate(entries) if i == 0 or entry != entries[i - 1]]


def test_a_bad_bit_costs_one_entry_at_most(path: Path) -> None:
    whole = parse_loss(LONG, path=path)
    num_mended = 0
    for position, bit in itertools.product(range(len(LONG)), range(8)):
        data = bytearray(LONG)
        data[position] ^= 1 << bit
        entries = parse_loss(bytes(data), path=path, torn_ok=True)
        assert len(set(whole) - set(entries)) <= 1, (position, bit)
        num_mended += scan_loss(bytes(data), path=path)[2].mended is not None
    assert num_mended > len(LONG)


@pytest.mark.parametrize("bad", [b"[3, q.5]", b"[3, 3,5]", b"\xff\xff", b"[2, 2.5],]3, 3.5]"])
def test_damage_in_the_middle_is_cut_out_and_the_rest_kept(path: Path, bad: bytes) -> None:
    """An entry in whose place the one before it stands again: counts in the journal stay true."""
    data = LONG.replace(b"[3, 3.5]", bad)
    path.write_bytes(data)
    seen = []
    file = LossFile.open(path, keep_cut=lambda cut: seen.append((cut, path.read_bytes())))
    ((cut, before),) = seen
    assert before == data
    assert bad.split(b",]")[-1] in cut
    assert file.repaired == len(cut) <= len(bad) + 4
    assert file.num_entries == 12 + bad.startswith(b"[2")
    assert [step for step, _ in file.entries()] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11]
    file.append(12, 0.5)
    file.close()
    assert json.loads(path.read_bytes())[-2:] == [[11, 11.5], [12, 0.5]]
    assert path.read_bytes().startswith(LONG[: LONG.index(b",\n[3")])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    again = reopened(path)
    assert (again.repaired, again.num_entries) == (0, file.num_entries)


@pytest.mark.parametrize(("good", "bad"), [(b"[\n[0", b"X\n[0"), (b",\n[3", b";\n[3")])
def test_a_bad_bracket_or_comma_costs_no_entry_and_no_count(
    path: Path, good: bytes, bad: bytes
) -> None:
    data = LONG.replace(good, bad)
    assert data != LONG
    path.write_bytes(data)
    assert parse_loss(data, path=path, torn_ok=True) == parse_loss(LONG, path=path)
    assert reopened(path).num_entries == 12
    assert parse_loss(path.read_bytes(), path=path) == parse_loss(LONG, path=path)


def test_damage_to_the_first_entry_and_to_the_bracket_before_it(path: Path) -> None:
    for bad in (b"{" + LONG[1:], LONG.replace(b"[0, 0.5]", b"[0, 0;5]")):
        path.write_bytes(bad)
        file = reopened(path)
        assert file.num_entries == 12
        assert file.entries() == parse_loss(LONG, path=path)[bad[0] == ord("[") :]
        json.loads(path.read_bytes())


@pytest.mark.parametrize("data", [b"", b"\0" * 4096, b" \n"])
def test_a_file_made_just_before_a_power_cut_becomes_an_empty_array(
    path: Path, data: bytes
) -> None:
    path.write_bytes(data)
    reopened(path)
    assert path.read_bytes() == b"[]"


def test_nul_bytes_behind_the_old_bracket_are_cut(path: Path) -> None:
    path.write_bytes(WHOLE + b"\0" * 100)
    file = reopened(path)
    assert path.read_bytes() == WHOLE
    assert file.repaired == 101


def test_what_is_cut_is_handed_over_before_anything_changes(path: Path) -> None:
    torn = WHOLE[:-1] + b",\n[4, 1.2"
    path.write_bytes(torn)
    seen = []
    LossFile.open(path, keep_cut=lambda cut: seen.append((cut, path.read_bytes()))).close()
    assert seen == [(b",\n[4, 1.2", torn)]


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": 1}',
        b'{\n"losses": [\n[1, 0.5],\n[2, 0.4]\n]\n}\n',
        b"[\n[1, 0.5],\n[2, NaN],\n[3, 0.25]\n]",
        b"[1, 2]",
        b"[[1, 2.5, 3]]",
        b'[["1", 2.5]]',
        b"[[1, true]]",
        b"[[true, 1.0]]",
        b"[[1.0, 1.0]]",
        b"[[-1, 1.0]]",
        b"[[1, NaN]]",
        b"[[1, 1e999]]",
        b"[[99999999999999999999, 1.0]]",
        b"PK\x03\x04",
        b"\xef\xbb\xbf[]",
    ],
)
def test_a_file_that_never_was_a_loss_file_is_refused_and_not_touched(
    path: Path, data: bytes
) -> None:
    path.write_bytes(data)
    with pytest.raises(CorruptFileError) as caught:
        LossFile.open(path)
    assert path.read_bytes() == data
    assert str(path) in str(caught.value)
    with pytest.raises(CorruptFileError):
        parse_loss(data, path=path, torn_ok=True)


NUMBERS = "0 7 -1 -0 9223372036854775807 9223372036854775808 2.5 1e5 1e999 -1e999 01 +1 .5 5. null"
EDGES = (b"nul", b"", b"-", b"1 2", b"1,2", b"1, 2", b"[1", b"NaN", b"true", b"1\0", b"9" * 400)
SHAPES = (
    b"[\n[%b, %b]]",
    b"[\n[1, 0.5],\n[%b, %b]]",
    b"[\n[%b, %b],\n[3, null]]",
    b"[\n[%b, %b],\n[3, 1.5]]\n",
    b"[\n[%b,  %b]]",
    b"[\n[%b, %b]],\n[3, 1]]",
    b"[\n[%b, %b],\n[3, 1",
    b"[\n%b[, %b]]",
    b"[\n[%b, ]%b]",
    b"[%b\n[, %b],\n[3, 1.5]]",
    b"[\n[1, 0.5],\n%b[, %b]]",
    b"[\n[1, 0.5],%b\n[, %b]]",
    b"%b[\n[, %b]]",
    b"[\n[%b,%b ]]",
)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_file_of_our_own_spacing_is_read_as_any_other(
    shape: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [*NUMBERS.encode().split(), *EDGES]
    files = [shape % (step, loss) for step in parts for loss in parts]

    def read(data: bytes) -> str:
        try:
            return repr(scan_loss(data, path="x"))
        except CorruptFileError as error:
            return str(error)

    found = [read(data) for data in files]
    is_quick = [_loss_format._scan_own(data) is not None for data in files]
    assert any(is_quick) == (shape in (*SHAPES[:3], SHAPES[-1]))
    monkeypatch.setattr(_loss_format, "_scan_own", lambda _: None)
    assert found == [read(data) for data in files]


def test_a_file_written_by_another_program_is_taken_as_it_is(path: Path) -> None:
    path.write_bytes(b"[[1, 3], [2,2e0] ]  \n")
    file = LossFile.open(path)
    assert file.repaired == 0
    file.append(3, 1.0)
    file.close()
    assert json.loads(path.read_bytes()) == [[1, 3], [2, 2.0], [3, 1.0]]
    assert path.read_bytes().startswith(b"[[1, 3], [2,2e0] ")


def test_a_tail_of_brackets_does_not_exhaust_the_stack(path: Path) -> None:
    path.write_bytes(WHOLE[:-1] + b"," + b"[" * 200_000)
    assert reopened(path).num_entries == 3


def test_a_reader_beside_the_writer_passes_over_a_torn_end() -> None:
    torn = WHOLE[:-1] + b",\n[4, 1"
    assert parse_loss(torn, path="x", torn_ok=True) == parse_loss(WHOLE, path="x")
    with pytest.raises(CorruptFileError, match="whole up to byte"):
        parse_loss(torn, path="x")


def test_a_full_disk_in_an_append_leaves_valid_json(path: Path, ops: CountedOps) -> None:
    file = LossFile.open(path)
    file.append(1, 2.5)
    ops.tear_after = 4
    with pytest.raises(StorageError):
        file.append(2, 2.25)
    assert ops.torn == 2
    assert json.loads(path.read_bytes()) == [[1, 2.5]]
    assert file.last_step == 1
    file.append(2, 2.0)
    file.close()
    assert json.loads(path.read_bytes()) == [[1, 2.5], [2, 2.0]]


def test_a_later_entry_voids_all_earlier_ones_of_its_step_or_above(path: Path) -> None:
    entries: list[LossEntry] = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (5, 5.0)]
    assert canonical(entries) == [(1, 1.0), (2, 2.5), (5, 5.0)]
    file = LossFile.open(path)
    for step, loss in entries:
        file.append(step, loss)
    for view in (file, reopened(path)):
        assert view.entries() == canonical(entries)
        assert view.get(3) is MISSING
        assert view.get(5) == (5, 5.0)
        assert view.at_or_before(4) == (2, 2.5)
        assert view.at_or_before(0) is None
        assert view.after(1) == [(2, 2.5), (5, 5.0)]
        assert (view.num_entries, view.num_canonical, view.last_step) == (5, 3, 5)
    file.close()


LOSSES = st.none() | st.floats(allow_nan=False, allow_infinity=False)
ENTRIES = st.lists(st.tuples(st.integers(0, 12), LOSSES), max_size=40)


@given(ENTRIES)
def test_the_canonical_reading_is_the_contract_taken_word_for_word(
    entries: list[LossEntry],
) -> None:
    plain = [
        entry
        for position, entry in enumerate(entries)
        if all(later[0] > entry[0] for later in entries[position + 1 :])
    ]
    assert canonical(entries) == plain
    data = b"[" + b",".join(encode_entry(*entry) for entry in entries) + b"]"
    steps, losses, scan = scan_loss(data, path="x")
    assert list(CanonicalIndex(steps, losses)) == plain
    assert (scan.end, scan.whole) == (len(data) - 1, True)


def test_a_history_of_200_000_steps_opens_and_grows_at_the_cost_of_a_short_one(
    path: Path, ops: CountedOps
) -> None:
    """Flat: opening reads each byte once and writes none, an append writes its own bytes."""
    data = b"[" + b",".join(b"\n[%d, 2.125]" % step for step in range(1, 200_001)) + b"]"
    path.write_bytes(data)
    file = LossFile.open(path)
    assert ops.read == len(data)
    assert ops.written == []
    file.append(200_001, 1.5)
    assert ops.written == [len(b",\n[200001, 1.5]]")]
    assert ops.read == len(data)
    assert file.num_canonical == 200_001
    index = file._index
    assert len(index._steps) * (index._steps.itemsize + index._losses.itemsize) <= 3_300_000
    file.close()


def test_sync_makes_the_entries_durable(path: Path, ops: CountedOps) -> None:
    synced = []
    ops.fdatasync = lambda fd: synced.append(os.fstat(fd).st_size)  # type: ignore[method-assign]
    file = LossFile.open(path)
    assert synced == [len(b"[]")]  # without its bracket an entry would look like somebody else's
    file.append(1, 2.5)
    assert len(synced) == 1
    file.sync()
    assert synced[1:] == [len(b"[\n[1, 2.5]]")]
    file.close()
