"""A run that begins from a .bin: what is said of it, and its first generation. Layer 6."""

from __future__ import annotations

from dist_ckpt.errors import SaveFailedError
from dist_ckpt.resume import Imported, Resumed
from dist_ckpt.service._attempt import Attempt
from dist_ckpt.service._saver import Saver
from dist_ckpt.service._voice import Voice
from dist_ckpt.wording import counted

__all__ = ["report_import", "save_import"]


def report_import(attempt: Attempt, imported: Imported, voice: Voice) -> None:
    """Rank 0: journal what was imported, and say aloud what wasn't."""
    attempt.journal(
        "imported",
        step=imported.step,
        file=imported.path,
        num_params=imported.num_params,
        stateless=list(imported.stateless),
        notes=list(imported.notes),
        replays_until=attempt.history.replays_until(imported.step),
    )
    voice.say(
        f"step {imported.step} imported from {imported.path}: "
        f"{counted(imported.num_params, 'parameter')} with both moments"
    )
    for note in imported.notes:
        voice.warn(note)


def save_import(saver: Saver, attempt: Attempt, imported: Imported) -> Resumed:
    """Have what was imported committed as the run's first generation, and return it. Collective.

    Raises:
        SaveFailedError: It could not be saved; the run has no generation then.
    """
    saver.save(imported.step, ("import",))
    committed = saver.wait_committed()
    if (failure := saver.take_failure()) is not None:
        raise failure
    if committed != imported.step:
        raise SaveFailedError(
            f"The import of step {imported.step} was not saved.",
            next_step="Rank 0 says why.",
            step=imported.step,
        )
    point = attempt.store.manifest(imported.step)
    return Resumed(imported.step, point, notes=imported.notes, imported=imported.path)
