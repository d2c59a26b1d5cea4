"""The example's network, text, update and samples; without a checkpoint in sight."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from andrea import (
    GPT,
    PRESETS,
    GPTConfig,
    TextWindows,
    Trainer,
    TrainingConfig,
    data_id,
    generate,
    load_sources,
)
from andrea.model import START
from andrea.text import WEIGHTS

CPU = torch.device("cpu")
SMALL = GPTConfig(num_layers=1, num_heads=2, width=16, context=16)


def a_batch(seed: int, context: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (4, context + 1), generator=generator)


def a_trainer(seed: int = 0, config: GPTConfig = SMALL, device: torch.device = CPU) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(GPT(config).to(device), TrainingConfig(), device)


# -------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    ("preset", "num_params", "bin_bytes"),
    [
        ("tiny", 467_200, 5_606_408),
        ("andrea-12m", 12_780_288, 153_363_464),
        ("andrea-120m", 120_030_592, 1_440_367_112),
    ],
)
def test_each_preset_has_the_size_it_is_known_for(
    preset: str, num_params: int, bin_bytes: int
) -> None:
    with torch.device("meta"):
        model = GPT(PRESETS[preset])
    assert model.num_params == num_params
    assert 8 + 12 * model.num_params == bin_bytes


def test_parameters_are_embeddings_then_each_layers_attention_and_mlp_then_the_head() -> None:
    names = [name for name, _ in GPT(PRESETS["tiny"]).named_parameters()]
    layers = [
        f"blocks.{layer}.{part}.weight"
        for layer in range(2)
        for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    assert names == ["token_embedding.weight", "position_embedding.weight", *layers, "head.weight"]


def test_a_tied_head_is_counted_once_and_shares_its_memory() -> None:
    free, tied = GPT(SMALL), GPT(dataclasses.replace(SMALL, tied=True))
    assert free.num_params - tied.num_params == SMALL.vocabulary * SMALL.width
    assert tied.head.weight is tied.token_embedding.weight


def test_no_position_sees_what_comes_after_it() -> None:
    model = GPT(SMALL).eval()
    tokens = a_batch(1)[:, :16]
    changed = tokens.clone()
    changed[:, 9:] = 0
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


# --------------------------------------------------------------------------------------- the update


def test_the_same_state_and_input_give_the_same_bits() -> None:
    results = []
    for _ in range(2):
        trainer = a_trainer()
        losses = [trainer.update(a_batch(step)) for step in range(3)]
        results.append([*losses, *(weight.detach() for weight in trainer.model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_makes_the_update_depend_on_the_random_numbers() -> None:
    trainers = [a_trainer(), a_trainer()]
    torch.manual_seed(1)
    one = trainers[0].update(a_batch(0))
    torch.manual_seed(2)
    other = trainers[1].update(a_batch(0))
    assert not torch.equal(one, other)


def test_a_few_updates_on_one_batch_bring_the_loss_down() -> None:
    trainer = a_trainer()
    losses = [float(trainer.update(a_batch(0))) for _ in range(40)]
    assert losses[-1] < losses[0] - 0.5


def test_the_learning_rate_warms_up_and_comes_down_to_a_tenth() -> None:
    torch.manual_seed(0)
    config = TrainingConfig(lr=1.0, warmup_steps=4, decay_steps=12)
    trainer = Trainer(GPT(SMALL), config, CPU)
    rates = []
    for _ in range(16):
        rates.append(trainer.lr)
        trainer.optimizer.step()
        trainer.scheduler.step()
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:12] == sorted(rates[5:12], reverse=True)
    assert rates[12:] == pytest.approx([0.1] * 4)


def test_a_new_learning_rate_is_followed_from_the_next_update_on() -> None:
    trainer = a_trainer()
    for step in range(3):
        trainer.update(a_batch(step))
    before = trainer.lr
    trainer.follow(trainer.config.lr)
    assert trainer.lr == before
    trainer.follow(10 * trainer.config.lr)
    assert trainer.lr == pytest.approx(10 * before)
    trainer.update(a_batch(3))
    assert trainer.lr == pytest.approx(10 * before * 5 / 4)


def test_adamw_has_the_betas_of_the_format() -> None:
    assert a_trainer().optimizer.param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.gpu
def test_on_cuda_two_runs_in_half_precision_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cuda = torch.device("cuda")
    config = dataclasses.replace(PRESETS["tiny"], width=256)
    results = []
    torch.use_deterministic_algorithms(mode=True)
    try:
        for _ in range(2):
            trainer = a_trainer(config=config, device=cuda)
            losses = [trainer.update(a_batch(step, 64)) for step in range(5)]
            results.append([*losses, *(weight.detach() for weight in trainer.model.parameters())])
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert trainer.scaler.is_enabled()
    assert all(weight.dtype == torch.float32 for weight in trainer.model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ----------------------------------------------------------------------------------------- the text


def test_there_are_three_sources_of_real_text() -> None:
    sources = load_sources(limit_bytes=200_000)
    assert list(sources) == list(WEIGHTS) == ["docs", "docstrings", "code"]
    for tokens in sources.values():
        assert tokens[0] == START
        assert 100_000 < tokens.size <= 200_000
    code = bytes(sources["code"][sources["code"] < START].tolist())
    assert b"import " in code


def test_the_data_id_is_the_same_for_the_same_text_and_changes_with_one_byte() -> None:
    sources = load_sources(limit_bytes=10_000)
    again = load_sources(limit_bytes=10_000)
    assert data_id(sources) == data_id(again)
    changed = again["code"].copy()
    changed[5] ^= 1
    assert data_id({**sources, "code": changed}) != data_id(sources)


def two_sources() -> dict[str, NDArray[np.uint16]]:
    return {
        "low": np.arange(0, 100, dtype=np.uint16),
        "high": np.arange(100, 250, dtype=np.uint16),
    }


def test_windows_come_from_each_source_by_its_weight() -> None:
    windows = TextWindows(two_sources(), context=4, weights={"low": 4.0, "high": 1.0})
    names = [windows.source_of(index) for index in range(len(windows))]
    assert names.count("low") == 4 * names.count("high") == 40


def test_every_window_is_a_stretch_of_its_own_source() -> None:
    windows = TextWindows(two_sources(), context=4)
    assert len(windows) == 50
    for index in range(len(windows)):
        window = windows[index].tolist()
        assert window == list(range(window[0], window[0] + 5))
        assert (window[-1] < 100) == (windows.source_of(index) == "low")


def test_a_window_depends_on_its_index_and_torchs_generator_alone() -> None:
    windows = TextWindows(load_sources(limit_bytes=50_000), context=32, weights=WEIGHTS)
    torch.manual_seed(7)
    first = windows[11]
    second = windows[11]
    torch.manual_seed(7)
    assert torch.equal(windows[11], first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("index", [-1, 50])
def test_an_index_outside_the_data_set_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        TextWindows(two_sources(), context=4)[index]


def test_weights_must_name_every_source_and_no_other() -> None:
    with pytest.raises(ValueError, match="sources are"):
        TextWindows(two_sources(), context=4, weights={"low": 1.0, "gone": 1.0})


# -------------------------------------------------------------------------------------- the samples


def test_a_sample_leaves_the_random_numbers_and_the_mode_alone() -> None:
    model = GPT(SMALL).train()
    before = torch.get_rng_state()
    generate(model, 40, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_a_sample_is_the_same_for_the_same_weights_and_seed() -> None:
    torch.manual_seed(0)
    model = GPT(SMALL)
    assert generate(model, 40, seed=3) == generate(model, 40, seed=3)
    assert generate(model, 40, seed=3) != generate(model, 40, seed=4)


def test_a_sample_goes_on_from_its_prompt() -> None:
    assert generate(GPT(SMALL), 5, seed=3, prompt="import ").startswith("import ")
