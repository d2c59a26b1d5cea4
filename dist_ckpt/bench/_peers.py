"""Other libraries among the contenders, each as its documentation uses it. Layer 7.

They are imported by name, and only where they are installed. What each needs to be at its best on
this machine is set, and said in a comment.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt.bench._contender import Contender, Folder, Wait, state_of
from dist_ckpt.bench._plan import installed_libraries
from dist_ckpt.bench._state import TrainingState

__all__ = ["PEERS"]


def _nothing() -> None:
    pass


class _Peer:
    name = ""
    aliases = False

    def __init__(self, state: TrainingState, folder: Path) -> None:
        self.state = state
        self.places = Folder(folder / self.name.replace(" ", "-").replace(".", "-"))

    def saved(self) -> Path:
        return self.places.newest

    def settle(self) -> dict[str, float]:
        if dist.get_rank() == 0:
            self.places.forget_older()
        return {}

    def close(self) -> None:
        pass


class _TorchSave(_Peer):
    name = "torch.save"
    aliases = True  # load_state_dict keeps the moments that torch.load has mapped

    def save(self, number: int) -> Wait:
        path = self.places.fresh(number)
        if dist.get_rank() == 0:  # as in DDP's tutorial
            torch.save(state_of(self.state), path)
        return _nothing

    def load(self) -> None:
        saved = torch.load(self.saved(), mmap=True, weights_only=True)
        self.state.model.load_state_dict(saved["model"])
        self.state.optimizer.load_state_dict(saved["optimizer"])


class _Safetensors(_Peer):
    name = "safetensors"

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        self._library = importlib.import_module("safetensors")
        self._torch = importlib.import_module("safetensors.torch")

    def save(self, number: int) -> Wait:
        path = self.places.fresh(number)
        if dist.get_rank() == 0:
            self._torch.save_file(dict(self.state.tensors()), path)
        return _nothing

    def load(self) -> None:
        with self._library.safe_open(self.saved(), "pt") as file:
            for name, tensor in self.state.tensors():
                tensor.copy_(file.get_tensor(name))


class _DcpSave(_Peer):
    name = "DCP save"

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        self.dcp = importlib.import_module("torch.distributed.checkpoint")

    def save(self, number: int) -> Wait:
        self.dcp.save(state_of(self.state), checkpoint_id=self.places.fresh(number))
        return _nothing

    def load(self) -> None:
        # It fills the tensors where they lie; load_state_dict of the optimizer, which would follow,
        # casts moments to the parameters' dtype and is left out in its favour.
        self.dcp.load(state_of(self.state), checkpoint_id=self.saved())


class _DcpAsync(_DcpSave):
    name = "DCP async_save"

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        staging = importlib.import_module("torch.distributed.checkpoint.staging")
        # One stager for all saves: its memory is reused. Pinned memory needs a GPU.
        self._stager = staging.DefaultStager(staging.StagingOptions(False, False, False, False))

    def save(self, number: int) -> Wait:
        future = self.dcp.async_save(
            state_of(self.state),
            checkpoint_id=self.places.fresh(number),
            async_stager=self._stager,
        )
        if hasattr(future, "upload_completion"):
            future.staging_completion.result()
            future = future.upload_completion
        return lambda: _done(future)

    def close(self) -> None:
        self._stager.close()


class _Torchsnapshot(_Peer):
    name = "torchsnapshot take"

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        self.library = importlib.import_module("torchsnapshot")

    def parts(self) -> dict[str, Any]:
        return {"model": self.state.model, "optimizer": self.state.optimizer}

    def save(self, number: int) -> Wait:
        path = str(self.places.fresh(number))
        self.library.Snapshot.take(path, self.parts(), replicated=["**"])
        return _nothing

    def load(self) -> None:
        self.library.Snapshot(str(self.saved())).restore(self.parts())


class _TorchsnapshotAsync(_Torchsnapshot):
    name = "torchsnapshot async_take"

    def save(self, number: int) -> Wait:
        path = str(self.places.fresh(number))
        pending = self.library.Snapshot.async_take(path, self.parts(), replicated=["**"])
        return lambda: _done(pending, "wait")


class _TorchCheckpointing(_Peer):
    name = "torch_checkpointing"

    def __init__(self, state: TrainingState, folder: Path) -> None:
        super().__init__(state, folder)
        library = importlib.import_module("torch_checkpointing")
        config = importlib.import_module("torch_checkpointing.config")
        staging = importlib.import_module("torch_checkpointing.staging")
        # Its settings for a machine without a GPU.
        stager = staging.CheckpointStagerConfig(
            use_pinned_memory=False, use_async_staging=False, use_non_blocking_copy=False
        )
        save = config.AsyncCheckpointSaverConfig(staging_config=stager)
        files = importlib.import_module("torch_checkpointing.storage.filesystem")
        # With its direct I/O, which is its default, every write fails here with EINVAL.
        storage = files.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = library.CheckpointManager(
            library.CheckpointManager.Config(save=save, storage_config=storage)
        )

    def save(self, number: int) -> Wait:
        future = self._manager.save(str(self.places.fresh(number)), state_of(self.state))
        with self._manager.lock():  # what its documentation puts around the optimizer's step
            pass
        return lambda: _done(future)

    def load(self) -> None:
        into = state_of(self.state)
        found: Mapping[str, Any] = self._manager.load(str(self.saved()), into=into)
        self.state.model.load_state_dict(found["model"])
        self.state.optimizer.load_state_dict(found["optimizer"])

    aliases = True

    def close(self) -> None:
        self._manager.close()


def _done(pending: Any, method: str = "result") -> None:
    getattr(pending, method)()


_CLASSES: tuple[Callable[[TrainingState, Path], Contender], ...] = (
    _TorchSave,
    _Safetensors,
    _DcpSave,
    _DcpAsync,
    _Torchsnapshot,
    _TorchsnapshotAsync,
    _TorchCheckpointing,
)
_BY_NAME = {made.name: made for made in _CLASSES}  # type: ignore[attr-defined]

#: Name → what makes the contender, for each library that is installed.
PEERS: dict[str, Callable[[TrainingState, Path], Contender]] = {
    name: _BY_NAME[name] for name in installed_libraries()
}
