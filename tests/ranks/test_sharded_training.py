"""Trainings divided among ranks in real use: stopped, killed, continued divided otherwise."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dist_ckpt
from dist_ckpt.errors import MismatchError
from dist_ckpt.generations import GenerationStore
from helpers.ranks import RankContext, RankResult, run_ranks

NUM_SAMPLES = 22


def _succeed(results: list[RankResult]) -> list[Any]:
    told = [result.stderr[-3000:] for result in results if result.returncode]
    assert not told, told[0]
    return [result.value for result in results]


def _latest(run: Path) -> Any:
    found = dist_ckpt.open_run(run).latest()
    assert found is not None
    return found


# FSDP2 on 4 ranks, on 2, on 4 ------------------------------------------------------------------


class Numbers:
    """Sample n is n and a row made of it."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, torch.sin(torch.arange(6.0) * (number + 1))


def _model(width: int = 7) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 1))


def _gathered(model: nn.Module) -> str:
    """Return a digest of the whole weights: dim 0 of each is cut, rank by rank."""
    import hashlib

    import torch.distributed as dist

    digest = hashlib.sha256()
    for parameter in model.parameters():
        local: Any = parameter
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, local.to_local().detach().tolist())
        digest.update(json.dumps([row for part in parts for row in part]).encode())
    return digest.hexdigest()


def _train(ctx: RankContext, folder: str, until: int, kill_at: int | None) -> None:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = dist_ckpt.ResumableLoader(Numbers(), batch_size=8, seed=2)
    torch.manual_seed(10 + ctx.rank)
    log = (Path(folder) / f"log.{ctx.rank}").open("a", encoding="utf-8", buffering=1)
    with dist_ckpt.Checkpointer(
        Path(folder) / "run", model=model, optimizer=optimizer, data=batches, every=3
    ) as ckpt:
        log.write(json.dumps({"resumed": ckpt.step, "weights": _gathered(model)}) + "\n")
        for step in ckpt.steps(until):
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            ids, x = next(batches)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ckpt.record(loss=loss)
            facts = {"step": step, "ids": ids.tolist(), "weights": _gathered(model)}
            log.write(json.dumps(facts) + "\n")
            with torch.no_grad():
                model(x)  # leaves unsharded parameters behind, as an evaluation does


def _log(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"log.{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_fsdp_goes_on_over_four_ranks_two_and_four_through_kills(tmp_path: Path) -> None:
    """Cases 35, 37, 38, 48: samples exactly once, losses unbroken, weights bit for bit."""
    for ranks, until, kill_at in ((4, 20, 8), (2, 20, 14), (4, 20, None)):
        results = run_ranks(ranks, _train, str(tmp_path), until, kill_at, timeout=100.0)
        expected = [0 if kill_at is None else -signal.SIGKILL] * ranks
        assert [result.returncode for result in results] == expected, results[0].stderr[-3000:]
    run = dist_ckpt.open_run(tmp_path / "run")
    resumed = [e for e in run.journal() if e["event"] == "resumed"]
    sizes = [(event["saved_world_size"], event["world_size"]) for event in resumed]
    assert sizes == [(4, 2), (2, 4)]
    for event in resumed:
        assert "can't be compared bit by bit" in event["notes"][0]
        assert "derive their random state" in event["notes"][1]
    assert [step for step, _ in run.loss()] == list(range(1, 21))
    # Weights of each step, as they first were; a resume begins with just these.
    weights: dict[int, str] = {}
    canonical: dict[int, list[int]] = {}
    for line in _log(tmp_path, 0):
        if "resumed" in line:
            step = line["resumed"]
            assert weights.setdefault(step, line["weights"]) == line["weights"]
            weights = {s: found for s, found in weights.items() if s <= step}
        else:
            weights[line["step"]] = line["weights"]
    for rank in range(4):
        steps: dict[int, list[int]] = {}
        for line in _log(tmp_path, rank):
            if "resumed" in line:
                steps = {s: ids for s, ids in steps.items() if s <= line["resumed"]}
            else:
                steps[line["step"]] = line["ids"]
        if rank >= 2:  # it wasn't there in the middle
            gone = range(resumed[0]["step"] + 1, resumed[1]["step"] + 1)
            steps = {s: ids for s, ids in steps.items() if s not in gone}
        for step, ids in steps.items():
            canonical.setdefault(step, []).extend(ids)
    stream = [number for step in sorted(canonical) for number in canonical[step]]
    assert len(stream) == 160
    # In the order of the stream: an epoch's samples come to 22, whatever batch they end in.
    counted = Counter(stream)
    assert set(counted.values()) == {160 // NUM_SAMPLES, 160 // NUM_SAMPLES + 1}
    _check_plain(tmp_path)


def _check_plain(folder: Path) -> None:
    """torchsnapshot restores the four ranks' last generation into a plain model."""
    from torchsnapshot import Snapshot

    model = _model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    snapshot: Any = Snapshot(str(folder / "run/checkpoints/step_000020"))
    snapshot.restore({"model": model})
    state = dist_ckpt.read_bin(folder / "run/step_000020.bin")
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    assert flat.numpy().tobytes() == state.weights.tobytes()
    loaded = _model()
    _latest(folder / "run").load_into(model=loaded)
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


# Stages of a pipeline --------------------------------------------------------------------------

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "3.weight"]


class Counting(nn.Linear):
    """A layer with a buffer and extra state of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("seen", torch.zeros(2))
        self.note = "none"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def _layers() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "0": Counting(3, 5), "1": nn.Linear(5, 5), "2": Counting(5, 5), "3": nn.Linear(5, 2, False),
    }  # fmt: skip


def _stage(mine: Any, seed: int) -> tuple[nn.ModuleDict, torch.optim.Optimizer]:
    """Layers that keep their own names, with state of one update made from ``seed``."""
    layers = _layers()
    model = nn.ModuleDict({name: layer for name, layer in layers.items() if name in mine})
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "lr": 0.5},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "lr": 0.25},
    ]
    optimizer = torch.optim.AdamW(groups)
    if seed:
        for name, parameter in model.named_parameters():
            parameter.grad = torch.full_like(parameter, seed + NAMES.index(name))
        optimizer.step()
        for name, module in model.items():
            if isinstance(module, Counting):
                module.note = f"of {name}"
                module.seen.fill_(int(name) + 1)  # type: ignore[operator]
    return model, optimizer


def _told(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {n: v.tolist() for n, v in model.named_buffers()}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        moments = [state[key].tolist() for key in ("exp_avg", "exp_avg_sq", "step")]
        found[name] = [parameter.tolist(), *moments]
    for name, module in model.named_modules():
        if isinstance(module, Counting):
            found[f"{name}.note"] = module.note
    return found


#: Interleaved: the order of the ranks isn't that of the layers.
STAGES = [["0", "2"], ["1", "3"]]


def _pipeline(
    ctx: RankContext, folder: str, stages: list[list[str]], order: list[str] | None, seed: int
) -> dict[str, Any]:
    model, optimizer = _stage(stages[ctx.rank], seed)
    with dist_ckpt.Checkpointer(
        Path(folder), model=model, optimizer=optimizer, order=order
    ) as ckpt:
        for _ in ckpt.steps(until=1):
            pass
    return _told(model, optimizer)


def test_stages_of_a_pipeline_are_one_model_and_continue_on_any_ranks(tmp_path: Path) -> None:
    """K12: names, groups, buffers and extra state of all stages, in the declared order."""
    run, whole = tmp_path / "run", list(_layers())
    expected = _told(*_stage(whole, 9))
    values = _succeed(run_ranks(2, _pipeline, str(run), STAGES, NAMES, 9))
    assert {**values[0], **values[1]} == expected
    # The file follows the declared order, which no rank's own is.
    store = GenerationStore(run)
    assert list(store.manifest(1).canonical.names) == NAMES
    model, _ = _stage(whole, 9)
    state = dist_ckpt.read_bin(run / "step_000001.bin")
    flat = torch.cat([dict(model.named_parameters())[name].reshape(-1) for name in NAMES])
    assert torch.equal(torch.from_numpy(state.weights.copy()), flat.detach())
    # As other stages, as replicas on both ranks, on one rank.
    for stages in ([["1", "3"], ["0", "2"]], [["0", "1"], ["2", "3"]], [whole, whole], [whole]):
        values = _succeed(run_ranks(len(stages), _pipeline, str(run), stages, None, 0))
        for mine, found in zip(stages, values, strict=True):
            assert found == {n: v for n, v in expected.items() if n.partition(".")[0] in mine}
    loaded, fresh = _stage(whole, 0)
    _latest(run).load_into(model=loaded, optimizer=fresh)
    assert _told(loaded, fresh) == expected


def test_without_a_declared_order_stages_have_no_bin_and_it_is_said(tmp_path: Path) -> None:
    results = run_ranks(2, _pipeline, str(tmp_path / "run"), STAGES, None, 9)
    _succeed(results)
    assert "no order= says how they follow each other" in results[0].stderr
    assert not (tmp_path / "run/step_000001.bin").exists()
    assert GenerationStore(tmp_path / "run").verified_at(1) is not None
    values = _succeed(run_ranks(2, _pipeline, str(tmp_path / "run"), STAGES, None, 0))
    assert {**values[0], **values[1]} == _told(*_stage(list(_layers()), 9))


def _same_names(ctx: RankContext, folder: str) -> str:
    torch.manual_seed(ctx.rank)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(MismatchError) as caught:
        dist_ckpt.Checkpointer(Path(folder), model=model, optimizer=optimizer).__enter__()
    text: str = caught.value.message
    return text


def test_stages_that_share_names_are_refused_before_a_weight_is_lost(tmp_path: Path) -> None:
    for text in _succeed(run_ranks(2, _same_names, str(tmp_path / "run"))):
        assert "2 parameters have other values on some ranks" in text
    assert not list((tmp_path / "run/checkpoints").glob("step_*"))


# Continued as if nothing had happened ----------------------------------------------------------


def _divided(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model divided by torch's own functions."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model: nn.Module = _model(8 if "tp" in kind else 7)  # torch's forward wants even shards there
    if kind == "zero":
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        return nn.parallel.DistributedDataParallel(model), zero
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    plan: Any = {"0": ColwiseParallel(), "3": RowwiseParallel()}
    if kind in {"tp", "fsdp_tp"}:
        parallelize_module(model, mesh["tp"], plan)
    if kind == "fsdp_tp":
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "fsdp":
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _attempt(run: Path, kind: str, until: int) -> list[Any]:
    """Train with fresh objects; return what this rank holds at the end, and its next draw."""
    model, optimizer = _divided(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    batches = dist_ckpt.ResumableLoader(Numbers(), batch_size=8, seed=2, rank=0, world_size=1)
    rank = torch.distributed.get_rank()
    torch.manual_seed(20)  # the same dropout on all ranks of a tensor-parallel group
    own = torch.Generator().manual_seed(30 + rank)
    losses = []
    with dist_ckpt.Checkpointer(
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=batches,
        generators={"own": own},
        every=100,
    ) as ckpt:
        for _ in ckpt.steps(until):
            _, x = next(batches)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            torch.rand(1, generator=own)
    held: Any = getattr(optimizer, "optim", optimizer)
    tensors = [*model.parameters(), *(v for s in held.state.values() for v in s.values())]
    local = [getattr(tensor, "_local_tensor", tensor).tolist() for tensor in tensors]
    draws = [float(torch.rand(1)), float(torch.rand(1, generator=own))]
    return [local, losses[-1], scheduler.get_last_lr(), draws]


def _cut_and_whole(ctx: RankContext, folder: str) -> list[str]:
    same = []
    for kind in ("fsdp", "tp", "fsdp_tp", "zero"):
        unbroken = _attempt(Path(folder) / f"{kind}-unbroken", kind, 6)
        _attempt(Path(folder) / f"{kind}-cut", kind, 3)
        if _attempt(Path(folder) / f"{kind}-cut", kind, 6) == unbroken:
            same.append(kind)
    return same


def test_a_sharded_training_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Cases 16 and 33: optimizer state, next learning rate and each rank's draws among it."""
    for same in _succeed(run_ranks(2, _cut_and_whole, str(tmp_path), timeout=100.0)):
        assert same == ["fsdp", "tp", "fsdp_tp", "zero"]


def _validate_first(ctx: RankContext, folder: str) -> int:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with dist_ckpt.Checkpointer(Path(folder), model=model, optimizer=optimizer) as ckpt:
        with torch.no_grad():
            model(torch.ones(1, 4))
        for _ in ckpt.steps(until=2):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return ckpt.step


def test_a_validation_before_the_loop_leaves_all_ranks_alike(tmp_path: Path) -> None:
    """Its weights are whole on every rank then; a look at one rank alone would part them."""
    assert _succeed(run_ranks(2, _validate_first, str(tmp_path / "run"), timeout=60.0)) == [2, 2]


# A place in the data that is a rank's own ------------------------------------------------------


class Cursor:
    """A loader that counts for itself, as a sampler of one rank does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _with_cursor(ctx: RankContext, folder: str, differ: bool, accept: list[str]) -> Any:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cursor = Cursor(ctx.rank if differ else 5)
    tag = Cursor(10 + ctx.rank)
    with dist_ckpt.Checkpointer(
        Path(folder),
        model=model,
        optimizer=optimizer,
        data=cursor,
        data_id="numbers",
        extra={"tag": tag},
        accept=accept,
        export="never",
    ) as ckpt:
        for _ in ckpt.steps(until=1):
            pass
        return [cursor.at, tag.at, list(ckpt.resumed.notes) if ckpt.resumed else None]


def test_a_place_in_the_data_of_each_rank_is_refused_on_fewer_ranks(tmp_path: Path) -> None:
    """Case 35: never dropped in silence; as many ranks, or one place for all, is fine."""
    own, same = str(tmp_path / "own"), str(tmp_path / "same")
    for folder, differ in ((own, True), (same, False)):
        _succeed(run_ranks(3, _with_cursor, folder, differ, []))
    assert [v[:2] for v in _succeed(run_ranks(3, _with_cursor, own, False, []))] == [
        [0, 10], [1, 11], [2, 12],
    ]  # fmt: skip
    refused = run_ranks(2, _with_cursor, own, True, [])
    assert [result.returncode for result in refused] == [1, 1]
    assert "The place in the data differed by rank on the 3 ranks" in refused[0].stderr
    assert "rank 0" in refused[1].stderr
    values = _succeed(run_ranks(2, _with_cursor, own, True, ["data"]))
    assert [value[:2] for value in values] == [[0, 10], [0, 10]]
    values = _succeed(run_ranks(2, _with_cursor, same, True, []))
    assert [value[:2] for value in values] == [[5, 10], [5, 10]]
    assert values[0][2][1].endswith("they differed by rank: extra.tag")


# The documentation -----------------------------------------------------------------------------


def _page(ctx: RankContext, page: str, folder: str) -> None:
    text = Path(page).read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    os.chdir(folder)
    path = Path(folder) / f"program{ctx.rank}.py"
    path.write_text(program, encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")


def test_the_examples_of_the_page_on_sharding_are_one_program_that_runs(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs/how-to/sharded.md"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_PORT": port}
    _succeed(run_ranks(2, _page, str(page), str(tmp_path), init=False, env=env, timeout=100.0))
    bins = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.bin"))
    assert bins == [
        "runs/fsdp/step_000020.bin",
        "runs/stages/step_000002.bin",
        "runs/tp/step_000020.bin",
        "runs/zero/step_000020.bin",
    ]


# A rank that can't tell what it holds ----------------------------------------------------------


def _fails_once(ctx: RankContext, folder: str) -> list[int]:
    torch.manual_seed(1)
    model = nn.Linear(2, 2)
    model.register_buffer("seen", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dist_ckpt.Checkpointer(
        Path(folder), model=model, optimizer=optimizer, every=1, export="never"
    ) as ckpt:
        for step in ckpt.steps(until=3):
            odd = ctx.rank == 1 and step == 2
            model.seen = torch.zeros(2).to_sparse() if odd else torch.zeros(2)
    return GenerationStore(Path(folder)).steps()


def test_a_rank_whose_state_cannot_be_kept_fails_that_save_and_no_other(tmp_path: Path) -> None:
    """Case 29: the others have nothing staged then, and all go on."""
    run = tmp_path / "run"
    assert _succeed(run_ranks(2, _fails_once, str(run))) == [[1, 3], [1, 3]]
    (failed,) = [e for e in dist_ckpt.open_run(run).journal() if e["event"] == "save_failed"]
    assert failed["step"] == 2
    assert "rank 1: capture: model/seen is a tensor of layout" in failed["error"]
    assert "rank 0" not in failed["error"]
