"""The resume protocol on a user's own command, from its words to a verdict. I/O, main thread."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dist_ckpt import storage
from dist_ckpt.comparison import Comparison, compare
from dist_ckpt.errors import DistCkptError, IncompleteError, SettingError, UsageError
from dist_ckpt.proof._causes import describe_first, explain
from dist_ckpt.proof._command import for_ranks, resolve_command, run_option
from dist_ckpt.proof._cuts import check_cuts, choose_cuts, kinds_of
from dist_ckpt.proof._first import First, drawn_from, find_first
from dist_ckpt.proof._launch import Launch, run_process
from dist_ckpt.proof._negative import (
    Control,
    Verdict,
    check_kinds,
    choose_parts,
    run_control,
)
from dist_ckpt.proof._scenario import Runner, Scenario
from dist_ckpt.signals import terminable

__all__ = ["DEFAULT_TIMEOUT_SECS", "DEFAULT_UNTIL", "Plan", "Proof", "run_proof"]

DEFAULT_UNTIL = 10
DEFAULT_TIMEOUT_SECS = 1800.0


@dataclass(frozen=True)
class Plan:
    """What is to be proven.

    Attributes:
        command: The user's words.
        output: The directory to be made; None: a new ``NAME.proof-K``.
        ranks: Ranks to start with this package's launcher; None: the command as it is.
        cuts: Steps to cut at; empty: chosen.
        until: Last step of the continuous run; a script may end before.
        run_arg: Option of the command that names the run directory and is to be rewritten.
        leave_out: Parts for negative controls; empty: all five kinds.
        timeout_secs: For each scenario.
    """

    command: Sequence[str]
    output: Path | None = None
    ranks: int | None = None
    cuts: Sequence[int] = ()
    until: int = DEFAULT_UNTIL
    run_arg: str | None = None
    leave_out: Sequence[str] = ()
    timeout_secs: float = DEFAULT_TIMEOUT_SECS

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        for name, value, least in (("--ranks", self.ranks, 1), ("--until", self.until, 2)):
            if value is not None and value < least:
                raise SettingError(
                    f"{name} {value} is too small.",
                    next_step=f"Give {name} {least} at least.",
                    found=value,
                )
        # Before anything is started; the run may end earlier, and have fewer parts.
        check_cuts(self.cuts, self.until)
        check_kinds(self.leave_out)
        if not self.timeout_secs > 0:
            raise SettingError(
                f"--timeout {self.timeout_secs} isn't a number of seconds above 0.",
                next_step="Give --timeout 600, say.",
                found=str(self.timeout_secs),
            )


@dataclass(frozen=True)
class Proof:
    """What was found.

    Attributes:
        output: The proof's directory.
        command: The user's words.
        continuous: The run without a cut.
        cuts: Where it was cut: step → what sort of place it is.
        scenarios: All that ran, in their order.
        diverged: The scenario of the resume that differs; None where all agree.
        first: Its first difference.
        cause: In words.
        final: Comparison of the last generations; None where an earlier step differs already.
        controls: The negative controls.
    """

    output: Path
    command: Sequence[str]
    continuous: Scenario
    cuts: dict[int, list[str]]
    scenarios: Sequence[Scenario]
    diverged: Scenario | None = None
    first: First | None = None
    cause: str | None = None
    final: Comparison | None = None
    controls: list[Control] = field(default_factory=list)

    @property
    def positive(self) -> bool:
        """Whether every resume is equal to the run without a cut."""
        return self.diverged is None

    @property
    def negative(self) -> bool | None:
        """Whether the controls that must differ do, and one at least does; None: not tried."""
        if not self.positive:
            return None
        diverged = any(control.verdict is Verdict.DIVERGED for control in self.controls)
        return diverged and not any(control.is_fault for control in self.controls)

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return self.positive and bool(self.negative)


def run_proof(
    plan: Plan, *, launch: Launch = run_process, tell: Callable[[str], None] = lambda _name: None
) -> Proof:
    """Return the outcome of all scenarios; the proof's directory holds what they left.

    Raises:
        UsageError: The plan can't be honoured; the directory exists.
        IncompleteError: A scenario couldn't be completed; the directory keeps its log.
    """
    words = resolve_command(plan.command)
    output = _new_output(plan)

    def wrap(changed: list[str]) -> list[str]:
        return for_ranks(changed, plan.ranks, plan.command[0])

    wrap(words)  # what is refused is refused before a directory is made
    _make_output(output)
    runner = Runner(
        output,
        words,
        plan.run_arg,
        ranks=plan.ranks,
        wrap=wrap,
        launch=launch,
        timeout_secs=plan.timeout_secs,
        tell=tell,
    )
    with terminable():
        try:
            return _run(plan, runner, output)
        except IncompleteError as error:
            raise IncompleteError(
                error.message,
                next_step=f"What was tried is left in {output}. {error.next_step}".strip(),
                **error.values,
            ) from error


def _run(plan: Plan, runner: Runner, output: Path) -> Proof:
    continuous = runner.run("continuous", plan.until, may_end_before=True)
    until = continuous.stop_at
    if until < 2:
        raise IncompleteError(
            f"The continuous run made {until} step: it can't be cut.",
            next_step="The script's loop must reach step 2 at least.",
        )
    leave_out = choose_parts(plan.leave_out, continuous.tracks[0].parts)
    track = continuous.tracks[0]
    cuts = check_cuts(plan.cuts, until) or choose_cuts(track, until)
    outcome = Proof(
        output,
        list(plan.command),
        continuous,
        {cut: kinds_of(track, cut) for cut in cuts},
        runner.scenarios,
    )
    chain = [runner.run(f"cut-{cuts[0]}", cuts[0])]
    if (first := _judge(continuous, chain)) is not None:
        return _diverged(outcome, first, chain)
    for cut, following in itertools.pairwise([*cuts, until]):
        chain.append(runner.run(f"resumed-{cut}-to-{following}", following, after=chain[-1]))
        if (first := _judge(continuous, chain)) is not None:
            return _diverged(outcome, first, chain)
    final = _compare_ends(continuous, chain[-1])
    if not final.agrees:
        cause = _describe_final(final)
        return replace(outcome, diverged=chain[-1], cause=cause, final=final)
    at_cuts = _middle_first(chain[:-1])
    controls = [run_control(part, runner, continuous, at_cuts) for part in leave_out]
    return replace(outcome, final=final, controls=controls)


def _judge(continuous: Scenario, chain: Sequence[Scenario]) -> First | None:
    before = chain[-2].tracks if len(chain) > 1 else None
    found = chain[-1]
    return find_first(continuous.tracks, found.tracks, opened_at=found.opened_at, before=before)


def _diverged(outcome: Proof, first: First, chain: Sequence[Scenario]) -> Proof:
    scenario = chain[-1]
    before = chain[-2].tracks if len(chain) > 1 else scenario.tracks
    cause = explain(first, scenario.tracks, before, opened_at=scenario.opened_at)
    sentence = describe_first(first)
    cause = f"{sentence[0].upper()}{sentence[1:]}. {cause}"
    return replace(outcome, diverged=scenario, first=first, cause=cause)


def _compare_ends(continuous: Scenario, resumed: Scenario) -> Comparison:
    """Compare the last generations bit by bit; equal infinities (masks, a best of inf) are fine.

    Generators that nobody draws from don't count: they may be unseeded.
    """
    a, b = continuous.generation, resumed.generation
    try:
        found = compare(a, b, atol=0.0, rtol=0.0, expect_infinite=("*",))
    except DistCkptError as error:
        raise IncompleteError(
            f"The last generations can't be compared: {error.message}",
            next_step=error.next_step,
        ) from error
    drawn = drawn_from(continuous.tracks)
    kept = [finding for finding in found.findings if _counts(finding.path, drawn)]
    return replace(found, findings=tuple(kept))


def _counts(path: str, drawn: set[str]) -> bool:
    parts = path.split("/")
    if parts[0] != "ranks" or "rng" not in parts:
        return True
    name = parts[parts.index("rng") + 1 :]
    return bool(drawn & {*name[:1], f"generators.{name[1]}" if name[1:] else ""})


def _describe_final(final: Comparison) -> str:
    return (
        "Every step was the same, the state at the end isn't: "
        f"{final.findings[0]}. Whatever holds it told another state than its steps showed, or a "
        "value isn't finite."
    )


def _middle_first(chain: Sequence[Scenario]) -> list[Scenario]:
    middle = len(chain) // 2
    return [chain[middle], *chain[:middle], *chain[middle + 1 :]]


def _new_output(plan: Plan) -> Path:
    if plan.output is not None:
        if storage.exists(plan.output):
            raise UsageError(
                f"{plan.output} exists: a proof is never written over anything.",
                next_step="Choose another -o, or leave it out.",
                path=str(plan.output),
            )
        return plan.output.absolute()
    if plan.run_arg is not None:
        base = Path(run_option(plan.command, plan.run_arg))
    else:
        scripts = [word for word in plan.command if word.endswith(".py")]
        base = Path(Path(scripts[0]).stem if scripts else Path(plan.command[0]).name)
    for number in itertools.count(1):
        path = base.with_name(f"{base.name}.proof-{number}")
        if not storage.exists(path):
            return path.absolute()
    raise AssertionError  # pragma: no cover - there are more numbers than names


def _make_output(output: Path) -> None:
    if not storage.is_dir(output.parent):
        raise UsageError(
            f"{output.parent} isn't a directory.",
            next_step="Make it first, or choose another -o.",
            path=str(output),
        )
    storage.make_dir(output)
