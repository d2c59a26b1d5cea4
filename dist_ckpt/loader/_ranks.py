"""Which rank this is, of how many, when the user doesn't say.

Part of layer 3. Reads torch.distributed and the environment; no I/O.
"""

from __future__ import annotations

import os

from dist_ckpt.comm import place_in_job
from dist_ckpt.errors import SettingError

__all__ = ["rank_and_world_size"]


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return what is given, else what torch.distributed, else what the environment says.

    Without any of these it is (0, 1). Not collective.

    Raises:
        SettingError: ``RANK`` or ``WORLD_SIZE`` isn't a number, or the rank isn't below the world
            size.
    """
    if rank is None or world_size is None:
        found = place_in_job() or (_from_environment("RANK", 0), _from_environment("WORLD_SIZE", 1))
        rank = found[0] if rank is None else rank
        world_size = found[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise SettingError(
            f"Rank {rank} of {world_size} doesn't exist: ranks count from 0 to world size - 1.",
            next_step="Give both rank= and world_size=, or neither.",
            expected=f"0 <= rank < {world_size}",
            found=rank,
        )
    return rank, world_size


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise SettingError(
            f"The environment variable {name} is {text!r}, which isn't a number.",
            next_step=f"Unset {name}, or let torchrun set it.",
            expected="a number",
            found=text,
        ) from None
