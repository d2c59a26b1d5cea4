"""Comparing identities: what differs, what accepts it, what the error says."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_ckpt import identity
from dist_ckpt.errors import IdentityError, SettingError
from dist_ckpt.identity import ABSENT, Difference
from dist_ckpt.identity._code import describe_code

ROOT = Path(__file__).parents[2]


class Model:
    """What capture says of a model."""

    def __init__(self, aliases: Any = (("head", "wte"),), **shapes: list[int]) -> None:
        self.shapes = shapes or {"wte": [5, 4], "fc": [4]}
        self.aliases = aliases

    def to_json(self) -> dict[str, Any]:
        return {
            "parameters": [[name, "float32", shape] for name, shape in self.shapes.items()],
            "buffers": [["mean", "float64", []]],
            "aliases": [list(pair) for pair in self.aliases],
        }


def facts(**options: Any) -> dict[str, Any]:
    """Return an identity as it comes back from a file."""
    given = {"structure": Model(), "config": {"lr": 0.1, "net": {"depth": 2}}, **options}
    found = identity.describe(**given).facts
    loaded: dict[str, Any] = json.loads(json.dumps(found, allow_nan=False))
    return loaded


def refused(saved: Any, current: Any, **options: Any) -> IdentityError:
    with pytest.raises(IdentityError) as caught:
        identity.check(saved, current, **options)
    return caught.value


@pytest.fixture(autouse=True)
def _nothing_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(identity.ACCEPT_VARIABLE, raising=False)


def test_an_unchanged_run_has_no_differences() -> None:
    assert identity.compare(facts(), facts()) == []
    assert identity.check(facts(), facts(), strict=True) == []


def test_another_learning_rate_is_refused_and_can_be_accepted() -> None:
    """Case 19: a new learning rate is refused, or an explicit recorded override; never ignored."""
    saved, current = facts(), facts(config={"lr": 0.2, "net": {"depth": 2}})
    error = refused(saved, current)
    assert "config.lr: 0.1 saved, 0.2 now" in str(error)
    assert "accept=('config.lr',) or DIST_CKPT_ACCEPT=config.lr" in str(error)
    (difference,) = identity.check(saved, current, accept=("config.lr",))
    assert difference == Difference("config", "lr", 0.1, 0.2, "config.lr")
    assert difference.to_json() == {
        "part": "config", "key": "lr", "word": "config.lr", "warning": False,
        "saved": 0.1, "current": 0.2,
    }  # fmt: skip


def test_the_environment_variable_accepts_with_the_value_that_the_error_prints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved = facts(data_id="a")
    current = facts(data_id="b", config={"lr": 0.2, "net": {"depth": 3}})
    monkeypatch.setenv(identity.ACCEPT_VARIABLE, "config.lr")
    error = refused(saved, current)
    assert error.accept == "config.lr,config.net.depth,data"
    monkeypatch.setenv(identity.ACCEPT_VARIABLE, error.accept)
    assert len(identity.check(saved, current)) == 3


def test_a_misspelt_word_is_not_carried_into_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, current = facts(), facts(config={"lr": 0.2, "net": {"depth": 2}})
    monkeypatch.setenv(identity.ACCEPT_VARIABLE, "config.rl,nonsense,extra.ema,policy.arm,data.*")
    assert refused(saved, current).accept == "extra.ema,policy.arm,data.*,config.lr"


@pytest.mark.parametrize(
    "accept", ["config", "config.net", "config.net.depth", "config.*", ("data", "config.n*")]
)
def test_a_part_a_parent_and_a_pattern_accept(accept: Any) -> None:
    current = facts(config={"lr": 0.1, "net": {"depth": 3}})
    assert len(identity.check(facts(), current, accept=accept)) == 1


@pytest.mark.parametrize("accept", [(), "data", "config.lr", "config.net.d", "scaler"])
def test_another_word_does_not_accept(accept: Any) -> None:
    refused(facts(), facts(config={"lr": 0.1, "net": {"depth": 3}}), accept=accept)


def test_keys_that_came_or_went_are_differences() -> None:
    differences = identity.compare(facts(config={"a": 1, "b": None}), facts(config={"b": 0}))
    assert [(d.key, d.saved, d.current) for d in differences] == [
        ("a", 1, ABSENT),
        ("b", None, 0),
    ]
    assert str(differences[0]) == "config.a: 1 saved, (absent) now"
    assert "current" not in differences[0].to_json()


def test_a_key_that_is_ignored_now_is_no_difference() -> None:
    saved = facts(config={"out": "a", "lr": 1})
    assert identity.compare(saved, facts(config={"lr": 1}, config_ignore="out")) == []
    assert identity.compare(saved, facts(config={"out": "b", "lr": 1}, config_ignore="o*")) == []


def test_numbers_are_equal_by_value_and_true_is_not_one() -> None:
    assert identity.compare(facts(config={"a": 1}), facts(config={"a": 1.0})) == []
    assert identity.compare(facts(config={"a": [1, 2]}), facts(config={"a": (1.0, 2)})) == []
    assert identity.compare(facts(config={"a": 1}), facts(config={"a": True}))


def test_a_configuration_left_out_is_refused_and_a_new_one_warned_of() -> None:
    assert "config: a configuration saved, none now" in str(refused(facts(), facts(config=None)))
    (difference,) = identity.check(facts(config=None), facts())
    assert difference.warning


def test_other_data_is_refused() -> None:
    """Case 47: data swapped under a resume, the same length: refused by the digest, or data_id."""

    class Feed:
        def __init__(self, rows: list[int]) -> None:
            self.dataset = rows

    saved, current = facts(data=Feed([1, 2, 3])), facts(data=Feed([1, 2, 4]))
    error = refused(saved, current)
    assert error.words == ["data"]
    assert "data.digest" in str(error)
    assert "data.length: 3 saved, 2 now" in str(refused(saved, facts(data=Feed([1, 2]))))
    assert "data.id: a saved, b now" in str(refused(facts(data_id="a"), facts(data_id="b")))
    assert refused(facts(data_id="a"), saved).words == ["data"]
    assert refused(saved, facts()).words == ["data"]
    assert identity.check(saved, current, accept=("data",))[0].key == "digest"
    (warned,) = identity.check(facts(), saved)
    assert warned.warning


def test_a_digest_that_could_not_be_had_in_time_warns_and_is_carried_on() -> None:
    saved = facts()
    saved["data"] = {"id": None, "length": 3, "digest": "sha256:0", "samples": 3}
    slow = copy.deepcopy(saved)
    slow["data"] |= {"digest": None, "samples": 0}
    (difference,) = identity.check(saved, slow)
    assert difference.warning
    assert identity.carry_on(saved, slow)["data"] == saved["data"]
    other = copy.deepcopy(slow)
    other["data"]["length"] = 4
    assert identity.carry_on(saved, other) == other
    assert identity.carry_on(saved, facts(data_id="a"))["data"]["id"] == "a"


def test_structure_is_names_shapes_and_ties_but_not_the_order_of_declaration() -> None:
    one = facts(structure=Model(wte=[5, 4], fc=[4]))
    other = facts(structure=Model([("wte", "head")], fc=[4], head=[5, 4]))
    assert one["structure"] == other["structure"]
    assert identity.compare(one, other) == []


def test_another_structure_is_refused_with_names_shapes_and_ties() -> None:
    error = refused(facts(), facts(structure=Model((), wte=[5, 8], fc=[4], head=[5, 8])))
    assert "structure.parameters.wte: float32[5, 4] saved, float32[5, 8] now" in str(error)
    assert 'structure.ties: [["head", "wte"]] saved, [] now' in str(error)
    assert error.words == []
    assert "accept" not in error.next_step
    assert "no word makes it" in error.next_step
    # Whoever insists meets the tensors' own check, which names each.
    identity.check(facts(), facts(structure=Model(fc=[9])), accept="structure")


def test_the_word_for_a_structure_is_offered_only_where_it_helps() -> None:
    tied, untied = facts(), facts(structure=Model((), wte=[5, 4], fc=[4], head=[5, 4]))
    error = refused(tied, untied)  # one saved value goes into both
    assert error.words == ["structure"]
    assert "accept=('structure',)" in error.next_step
    assert refused(untied, tied).words == []  # two saved values don't go into one


class Loader:
    """What identity asks of a ResumableLoader."""

    last_indices: tuple[int, ...] = ()

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.dataset = [[1.0], [2.0]]


def test_another_global_batch_size_is_refused_by_name() -> None:
    saved, current = facts(data=Loader(4)), facts(data=Loader(8))
    error = refused(saved, current)
    assert "data.batch_size: 4 saved, 8 now" in str(error)
    assert error.words == ["data.batch_size"]
    assert len(identity.check(saved, current, accept=error.words)) == 1
    assert identity.carry_on(saved, current)["data"]["batch_size"] == 8
    before = copy.deepcopy(saved)
    del before["data"]["batch_size"]  # saved before it was kept
    assert identity.check(before, current) == []
    assert refused(facts(data=Loader(4), data_id="a"), facts(data=Loader(8), data_id="a")).words


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("cofnig.lr", "config.lr"),
        ("config.lrr", "config.lr"),
        ("config.net.depht", "config.net.depth"),
        ("fresh-start", "fresh_start"),
        ("structur", "structure"),
        ("extra.emma", "extra.ema"),
        ("xyzzy", None),
    ],
)
def test_a_word_that_names_nothing_is_told_with_the_nearest(word: str, near: str | None) -> None:
    found = identity.unknown_words([word, "config.lr"], [facts()], ["extra.ema", "scheduler"])
    assert found == {word: near}


def test_words_that_could_name_something_are_let_through() -> None:
    words = ["config", "config.*", "config.net", "data.batch_size", "versions.*", "extra.ema"]
    words += ["scaler", "scheduler", "policy", "fresh_start", "generators.noise", "code"]
    assert identity.unknown_words(words, [facts()], ["extra.ema"]) == {}


def test_code_and_versions_warn_and_are_refused_when_strict() -> None:
    saved, current = facts(), facts()
    current["versions"]["torch"] = "9.9"
    current["code"]["main"] = "0" * 64
    saved["code"]["main"] = "1" * 64
    saved["code"]["git"] = None  # no git there: nothing to compare with
    warned = identity.check(saved, current)
    assert [(d.part, d.key, d.warning) for d in warned] == [
        ("code", "main", True),
        ("versions", "torch", True),
    ]
    error = refused(saved, current, strict=True)
    assert error.words == ["code", "versions.torch"]
    assert len(identity.check(saved, current, strict=True, accept=error.words)) == 2


def test_at_most_twenty_differences_are_printed_and_all_are_carried() -> None:
    saved = facts(config={f"key_{n:02d}": 0 for n in range(30)})
    error = refused(saved, facts(config={f"key_{n:02d}": 1 for n in range(30)}))
    assert str(error).count("0 saved, 1 now") == 20
    assert "… and 10 more" in str(error)
    assert len(error.differences) == 30
    copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own error
    assert copied.to_json() == error.to_json()
    json.dumps(error.to_json(), allow_nan=False)


def test_a_key_with_a_comma_is_accepted_by_the_whole_part(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, current = facts(config={"a,b": 1}), facts(config={"a,b": 2})
    error = refused(saved, current)
    monkeypatch.setenv(identity.ACCEPT_VARIABLE, error.accept)
    assert identity.check(saved, current)[0].word == "config"


def test_an_empty_data_id_is_refused() -> None:
    with pytest.raises(SettingError, match="data_id is empty"):
        facts(data_id="")


def test_a_described_run_tells_its_versions_and_what_it_could_not_tell() -> None:
    described = identity.describe(structure=Model(), data=iter([1]))
    assert described.facts["data"] is None
    assert len(described.notes) == 1
    assert described.facts["versions"].keys() == {
        "python", "torch", "numpy", "dist_ckpt", "cuda", "device",
    }  # fmt: skip
    json.dumps(described.facts, allow_nan=False)


def test_code_is_told_by_digest_commit_and_uncommitted_changes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    found = describe_code(str(script))
    assert found["path"] == "train.py"
    assert found["main"] == "cc42155088fca5730758db72b2a5bca33112a941dfaa2d43098ec422ce4ea213"
    assert (found["git"], found["dirty"]) == (None, None)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }  # fmt: skip
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run(["/usr/bin/env", "git", *command], cwd=tmp_path, env=environment, check=True)
    found = describe_code(str(script))
    assert len(found["git"]) == 40
    assert found["dirty"] is False
    (tmp_path / "output.txt").write_text("a run's own file")
    assert describe_code(str(script))["dirty"] is False
    script.write_text("print(2)\n")
    assert describe_code(str(script))["dirty"] is True


def test_without_git_or_a_script_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = describe_code(str(ROOT / "pyproject.toml"))
    assert found["main"]
    assert (found["git"], found["dirty"]) == (None, None)
    assert describe_code(str(tmp_path / "gone.py"))["main"] is None


def test_a_git_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_code(str(ROOT / "pyproject.toml"))["git"] is None


def test_comparing_needs_neither_torch_nor_numpy() -> None:
    told = (
        "import sys\n"
        "from dist_ckpt import identity\n"
        "identity.check({}, {})\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", told], check=False, env=environment)
    assert done.returncode == 0
