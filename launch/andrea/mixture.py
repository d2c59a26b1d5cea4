"""One loader for each source, and the place in all of them as one state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dist_ckpt import ResumableLoader


class Mixture:
    """Batches by source; `data` of a Checkpointer.

    Args:
        loaders: Name of a source → its loader.
    """

    def __init__(self, loaders: Mapping[str, ResumableLoader]) -> None:
        self.loaders = dict(loaders)
        self.last_source: str | None = None

    def take(self, source: str) -> Tensor:
        """Return this rank's part of the next batch of a source."""
        self.last_source = source
        batch: Tensor = next(self.loaders[source])
        return batch

    @property
    def last_indices(self) -> npt.NDArray[np.int64]:
        """Sample numbers of the last batch, within its source; for proofs."""
        if self.last_source is None:
            return np.empty(0, np.int64)
        return self.loaders[self.last_source].last_indices

    def state_dict(self) -> dict[str, Any]:
        """Return the place in each source."""
        return {name: loader.state_dict() for name, loader in self.loaders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in each source that was saved; a new one starts at its beginning."""
        for name, loader in self.loaders.items():
            if name in state:
                loader.load_state_dict(state[name])
        self.last_source = None
