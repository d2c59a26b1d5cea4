"""Any mixture of appends, torn appends, reopenings and rewinds keeps the loss file right."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dist_ckpt.history import LossEntry, LossFile, canonical, parse_loss
from dist_ckpt.history._json_array import encode_append
from dist_ckpt.history._loss_format import encode_entry

LOSSES = st.none() | st.floats(allow_nan=False, allow_infinity=False)


class LossFileMachine(RuleBasedStateMachine):
    """The model is the plain list of entries; the file must say the same at every instant."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="loss-file-"))
        self.path = self.folder / "run.loss.json"
        self.raw: list[LossEntry] = []
        self.kept = b"["

    @initialize()
    def start(self) -> None:
        self.file = LossFile.open(self.path)

    @rule(step=st.integers(0, 20), loss=LOSSES)
    def append(self, step: int, loss: float | None) -> None:
        self.file.append(step, loss)
        self.raw.append((step, loss))

    @rule(step=st.integers(0, 20))
    def rewind(self, step: int) -> None:
        anchor = self.file.at_or_before(step)
        if anchor is not None:
            self.append(*anchor)
            last = self.file.last_step
            assert last is not None
            assert last <= step

    @rule(
        entry=st.tuples(st.integers(0, 20), LOSSES),
        kept=st.integers(0, 40),
        tail=st.sampled_from([b"", b"\0", b"\0" * 40, b"\xff{[", b"}"]),
    )
    def crash_in_an_append(self, entry: LossEntry, kept: int, tail: bytes) -> None:
        self.file.close()
        old = self.path.read_bytes()
        new = encode_append(encode_entry(*entry), first=not self.raw)[:kept]
        torn = (old[:-1] + new if new else old) + tail
        self.path.write_bytes(torn)
        # The entry is there if its own bracket was written, whatever came of the closing one.
        if new.rstrip(b"]").endswith(encode_entry(*entry)[:-1]) and b"]" in new:
            self.raw.append(entry)
        assert parse_loss(torn, path=self.path, torn_ok=True) == self.raw
        self.file = LossFile.open(self.path)

    @rule()
    def reopen(self) -> None:
        self.file.close()
        self.file = LossFile.open(self.path)
        assert self.file.repaired == 0

    @invariant()
    def the_file_says_what_the_model_says(self) -> None:
        if not hasattr(self, "file"):
            return
        data = self.path.read_bytes()
        assert json.loads(data) == [list(entry) for entry in self.raw]
        assert self.file.num_entries == len(self.raw)
        assert self.file.entries() == canonical(self.raw)
        assert data.startswith(self.kept)
        assert data.endswith(b"]")
        self.kept = data[:-1]

    def teardown(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
        shutil.rmtree(self.folder)


LossFileMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestAnyMixtureKeepsTheLossFileRight = LossFileMachine.TestCase
