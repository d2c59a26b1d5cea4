"""A generation rewritten for another number of ranks: the same tensors, whatever the boxes were."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dist_ckpt
from dist_ckpt import reshard as resharding
from dist_ckpt.capture import Captured
from dist_ckpt.generations import GenerationStore
from dist_ckpt.resume import Reader
from dist_ckpt.runs import open_run, pivot_run
from helpers.boxes import columns, in_memory, lay_out, write_boxed
from helpers.generating import Part, adam_part, part_of, write_generation
from helpers.pivoting import Training
from helpers.run_dirs import ended_run, snapshot_of
from helpers.trainers import final, train
from helpers.training import Options

STEP = "checkpoints/step_000100"


def rewrite(run: Path, ranks: int, out: Path, *, memory: int = 64 << 20) -> Path:
    """Have the run's newest generation rewritten; return the new run."""
    store = GenerationStore(run)
    job = resharding.prepare(store, store.manifest(store.steps()[-1]), ranks)
    return resharding.reshard(job, out, memory_bytes=memory).path


def tensors_of(run: Path) -> Mapping[str, torch.Tensor]:
    generation = dist_ckpt.open_run(run).latest()
    assert generation is not None
    return {key: generation.tensor(key) for key in generation.tensors}


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


def shard(run: Path, rank: int = 0) -> bytes:
    return (run / STEP / f"rank_{rank:05d}.shard").read_bytes()


@pytest.fixture(scope="module")
def part() -> Part:
    """Dims of 7, 1 and 0, no dims, bfloat16 beside float32, one without state, buffers."""
    torch.manual_seed(0)
    weights = {
        "seven": torch.randn(7, 7),
        "one": torch.randn(1, 5, 1),
        "none": torch.zeros(0, 4),
        "scalar": torch.randn(()),
        "half/slash": torch.randn(7, 3).bfloat16(),
        "frozen": torch.randn(2, 2),
        "large": torch.randn(300, 7, 91),
    }
    buffers = {"count": torch.tensor(5), "mean": torch.randn(7).bfloat16()}
    return adam_part(weights, stateless=["frozen"], buffers=buffers)


@pytest.fixture
def fast() -> Iterator[Path]:
    """A directory in memory where there is one, for many runs."""
    with in_memory() as path:
        yield path


@given(
    source=st.randoms(use_true_random=False),
    ranks=st.tuples(*[st.integers(1, 5)] * 3),
    memory=st.sampled_from([3 << 20, 6 << 20, 400 << 20]),
)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_boxes_on_any_ranks_come_out_the_same_in_one_step_or_two(
    part: Part, source: random.Random, ranks: tuple[int, int, int], memory: int
) -> None:
    """Case 34: uneven and empty parts."""
    with in_memory() as home:
        write_boxed(home / "a", part, ranks[0], source)
        wanted = {item.spec.key: item.tensor for item in part.tensors}
        assert_same(tensors_of(home / "a"), wanted)
        rewrite(home / "a", ranks[1], home / "b", memory=memory)
        assert_same(tensors_of(home / "b"), wanted)
        rewrite(home / "b", ranks[2], home / "c", memory=memory)
        rewrite(home / "a", ranks[2], home / "direct", memory=memory)
        for rank in range(ranks[2]):
            assert shard(home / "c", rank) == shard(home / "direct", rank)
        assert_same(tensors_of(home / "c"), wanted)


def test_columns_of_several_ranks_become_rows_and_the_shard_of_one_rank_is_the_bin(
    fast: Path,
) -> None:
    """Decision 1 of the architecture: world size one in float32."""
    part = adam_part({"a": torch.randn(130, 301), "b": torch.randn(9)}, stateless=["b"])
    specs = [item.spec for item in part.tensors]
    cuts = {
        spec.key: columns(spec.boxes[0], 3)
        for spec in specs
        if spec.role in {"weight", "exp_avg", "exp_avg_sq"}
    } | {spec.key: [(1, spec.boxes[0])] for spec in specs if spec.role == "optimizer"}
    write_generation(fast / "columns", [part] * 3, layout=lay_out(specs, cuts, 3))
    rewrite(fast / "columns", 1, fast / "one")
    assert GenerationStore(fast / "one").manifest(100).canonical.is_shard
    state = dist_ckpt.read_bin(fast / "one" / STEP / "rank_00000.shard")
    assert state.step == 100
    tensors = [item.tensor for item in part.tensors if item.spec.role == "weight"]
    assert torch.equal(
        torch.from_numpy(state.weights.copy()), torch.cat([t.flatten() for t in tensors])
    )
    assert not state.v[-9:].any()
    write_generation(fast / "trained", [part])
    assert shard(fast / "one") == shard(fast / "trained")


def test_ranks_get_the_parts_that_a_training_would_give_them(fast: Path, part: Part) -> None:
    write_generation(fast / "one", [part])
    write_generation(fast / "three", [part] * 3)
    rewrite(fast / "one", 3, fast / "out")
    for rank in range(3):
        assert shard(fast / "out", rank) == shard(fast / "three", rank)


def test_tied_tensors_stay_tied_and_the_index_is_torchsnapshots(fast: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(7, 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embedding.weight

    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.embedding(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    write_generation(fast / "two", [part_of(Captured(model, optimizer))] * 2)
    rewrite(fast / "two", 3, fast / "three")
    other = Tied()
    generation = dist_ckpt.open_run(fast / "three").latest()
    assert generation is not None
    generation.load_into(model=other, optimizer=torch.optim.AdamW(other.parameters()))
    assert torch.equal(other.head.weight, model.head.weight)
    import torchsnapshot

    third = Tied()
    torchsnapshot.Snapshot(str(generation.path)).restore({"model": third})
    assert torch.equal(third.head.weight, model.head.weight)


@functools.cache
def _trained(ranks: int) -> Path:
    """A run of that many ranks up to step 5."""
    home = Path(tempfile.mkdtemp(prefix="reshard-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    train(Options(str(home / "run"), str(home / "out"), until=5, every=5), ranks=ranks)
    return home / "run"


def train_and_compare(tmp_path: Path, old: int, new: int) -> None:
    """A resume of the rewritten run is a resume of the run itself on as many ranks."""
    shutil.copytree(_trained(old), tmp_path / "run")
    rewrite(tmp_path / "run", new, tmp_path / "rewritten")
    ended = []
    for name in ("run", "rewritten"):
        later = Options(str(tmp_path / name), str(tmp_path / f"{name}-out"), until=8, every=5)
        train(later, ranks=new)
        ended.append([final(later, rank) for rank in range(new)])
    assert ended[0] == ended[1]
    run = dist_ckpt.open_run(tmp_path / "rewritten")
    assert [step for step, _ in run.loss()] == list(range(1, 9))
    assert run.loss()[:5] == dist_ckpt.open_run(tmp_path / "run").loss()[:5]
    (event,) = [e for e in run.journal() if e["event"] == "resumed"]
    assert (event["step"], event["saved_world_size"]) == (5, new)


def test_training_goes_on_from_fewer_ranks_as_a_resume_there_does(tmp_path: Path) -> None:
    """Case 35: the loader's state is carried. K12: another number of ranks."""
    train_and_compare(tmp_path, 2, 1)


def test_training_goes_on_on_new_ranks_as_a_resume_there_does(tmp_path: Path) -> None:
    """Case 33: the new rank's random state is its own, and the same as in a plain resume."""
    train_and_compare(tmp_path, 1, 2)


def test_at_the_same_number_of_ranks_everybody_keeps_everything(tmp_path: Path) -> None:
    """Case 33."""
    run = _trained(2)
    rewrite(run, 2, tmp_path / "again")
    assert dist_ckpt.compare(f"{run}@5", f"{tmp_path}/again@5").agrees
    stores = [GenerationStore(where) for where in (run, tmp_path / "again")]
    old, new = (Reader(store, store.manifest(5)) for store in stores)
    for rank in range(2):
        one, other = old.tail(rank), new.tail(rank)
        assert (one.values, one.shared) == (other.values, other.shared)
        own = old.own(rank, one.buffers.values())
        assert own
        kept = new.own(rank, other.buffers.values())
        assert all(torch.equal(a, b) for a, b in zip(own, kept, strict=True))


def test_the_new_run_tells_where_it_comes_from_and_the_source_is_untouched(tmp_path: Path) -> None:
    run = ended_run(tmp_path)
    before = snapshot_of(run)
    store = GenerationStore(run)
    job = resharding.prepare(store, store.manifest(8), 3)
    told: list[int] = []
    done = resharding.reshard(job, tmp_path / "new", progress=told.append)
    assert snapshot_of(run) == before
    assert sum(told) <= 2 * job.num_bytes
    new = dist_ckpt.open_run(tmp_path / "new")
    point = GenerationStore(tmp_path / "new").manifest(8)
    assert (point.run, point.step, point.reasons, point.world_size) == ("new", 8, ("reshard",), 3)
    assert point.parent == {"step": 8, "id": job.point.id}
    assert point.identity == job.point.identity
    assert point.id != job.point.id
    assert done.point == point
    (event,) = new.journal()
    assert (event["event"], event["attempt"], event["step"]) == ("resharded", 0, 8)
    assert event["source"] == str(store.path(8))
    assert new.loss() == [entry for entry in dist_ckpt.open_run(run).loss() if entry[0] <= 8]
    assert GenerationStore(tmp_path / "new").verified_at(8) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "small"]


def test_the_history_is_carried_up_to_the_step_with_what_isnt_finite(tmp_path: Path) -> None:
    given = Options(str(tmp_path / "run"), str(tmp_path / "out"), until=7, every=5, nan_at=4)
    train(given)
    store = GenerationStore(tmp_path / "run")
    resharding.reshard(resharding.prepare(store, store.manifest(5), 2), tmp_path / "new")
    new, old = (dist_ckpt.history.read_history(tmp_path / name) for name in ("new", "run"))
    assert new.loss == old.loss[:5]
    assert new.loss[3] == (4, None)
    assert new.metrics == old.metrics[:5]
    kinds = [e["kind"] for e in new.journal if e["event"] == "loss_not_finite"]
    assert kinds == ["nan"]


def test_the_policy_goes_on_as_on_the_run_itself_with_its_settings_and_a_pivot_that_is_due(
    tmp_path: Path,
) -> None:
    run = tmp_path / "andrea"
    before = Training()
    before.train(run, 20)
    pivot_run(open_run(run), {"floors": {"docs": 2.0}})
    before.train(run, 25)
    rewrite(run, 2, tmp_path / "same")
    with (same := Training()).checkpointer(tmp_path / "same"):
        assert same.bandit.state_dict() == before.bandit.state_dict()
        assert same.bandit.settings.floors == {"docs": 2.0}
    pivot_run(open_run(run), {"floors": {"docs": 3.0}})
    rewrite(run, 2, tmp_path / "fresh")
    with (fresh := Training()).checkpointer(tmp_path / "fresh"):
        assert all(arm.pulls == 0 for arm in fresh.bandit.arms.values())
        assert fresh.bandit.settings.floors == {"docs": 3.0}
