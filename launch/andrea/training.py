"""One update of ANDREA: AdamW, warm-up and cosine, fp16 on CUDA, deterministic settings."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class TrainingConfig:
    """How the network is trained; all of it belongs to the run's identity."""

    lr: float = 1e-3
    weight_decay: float = 0.1
    warmup_steps: int = 20
    decay_steps: int = 200_000
    """After so many steps the learning rate has come down to a tenth, and stays there."""
    max_norm: float = 1.0


def make_deterministic() -> None:
    """From here on the same state and input give the same bits, on CUDA too."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False


class Trainer:
    """Optimizer, scheduler and scaler of one network, and `update`, which makes one step with them.

    Args:
        model: The network, wrapped for DDP or not.
        config: Learning rate and schedule.
        device: Where the network lies. On CUDA the forward pass runs in fp16, the weights stay
            fp32.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig, device: torch.device) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.optimizer = AdamW(
            model.parameters(), lr=config.lr, betas=(0.9, 0.999), weight_decay=config.weight_decay
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: _share(step, config))
        self.scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    @property
    def lr(self) -> float:
        """The learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def follow(self, lr: float) -> None:
        """Make `lr` the full learning rate, now and later; nothing changes when it is already.

        For after a resume: what was restored holds the rate that was saved, and a new one that was
        accepted must not be forgotten.
        """
        if self.scheduler.base_lrs == [lr]:
            return
        self.scheduler.base_lrs = [lr]
        for group in self.optimizer.param_groups:
            group["initial_lr"] = lr
            group["lr"] = lr * _share(self.scheduler.last_epoch, self.config)

    def loss(self, windows: Tensor) -> Tensor:
        """Return the loss of (batch, context + 1) tokens, on the device."""
        windows = windows.to(self.device, non_blocking=True)
        with torch.autocast(self.device.type, torch.float16, enabled=self.scaler.is_enabled()):
            logits = self.model(windows[:, :-1])
            return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def update(self, windows: Tensor) -> Tensor:
        """Make one update from (batch, context + 1) tokens; its loss stays on the device."""
        loss = self.loss(windows)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.detach()


def _share(step: int, config: TrainingConfig) -> float:
    """Return the share of the full learning rate at `step`: up in a line, then a cosine down."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    length = max(1, config.decay_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / length)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))
