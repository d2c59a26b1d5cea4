"""The experiment: 24 rows, 33 parameters, three generators that matter, and how to go on."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from randomness import observe_draws, read_rng, restore_rng

ROWS_PATH = Path(__file__).resolve().with_name("rows.csv")

#: What makes two runs the same experiment; kept in the checkpoint.
CONFIG: dict[str, Any] = {
    "rows": 24,
    "variables": 2,
    "hidden": 8,
    "dropout": 0.25,
    "batch_size": 4,
    "optimizer": "Adam",
    "lr": 0.03,
    "scheduler": "StepLR",
    "step_size": 3,
    "gamma": 0.5,
    "gain": 0.02,
    "noise": 0.01,
    "seed": 20260924,
    "dtype": "float64",
    "device": "cpu",
    "threads": 1,
}
NUM_PARAMETERS = 33


def read_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the variables, shape (24, 2), and the targets, shape (24, 1), float64."""
    with ROWS_PATH.open(encoding="ascii", newline="") as file:
        rows = list(csv.DictReader(file))
    x = torch.tensor([[float(row["x1"]), float(row["x2"])] for row in rows], dtype=torch.float64)
    y = torch.tensor([[float(row["target"])] for row in rows], dtype=torch.float64)
    return x, y


def build_model() -> torch.nn.Sequential:
    """Return the network: 2 → 8 → 1, dropout in between."""
    return torch.nn.Sequential(
        torch.nn.Linear(CONFIG["variables"], CONFIG["hidden"]),
        torch.nn.Tanh(),
        torch.nn.Dropout(CONFIG["dropout"]),
        torch.nn.Linear(CONFIG["hidden"], 1),
    ).double()


class Experiment:
    """One process's objects, at a closed boundary between two updates, from the first seed on.

    Attributes:
        step: Finished updates.
        epoch: Permutations drawn so far.
        permutation: The order of the rows in this epoch.
        cursor: Rows of it that are used.
        history: One entry an update: what went in, at which learning rate, and the loss.
    """

    def __init__(self) -> None:
        torch.set_num_threads(CONFIG["threads"])
        torch.use_deterministic_algorithms(mode=True)
        random.seed(CONFIG["seed"])
        torch.manual_seed(CONFIG["seed"])
        self.generator = np.random.Generator(np.random.PCG64(CONFIG["seed"]))
        self.x, self.y = read_rows()
        self.model = build_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=CONFIG["lr"])
        # Built before the optimizer's state is loaded: it writes a learning rate into the groups.
        self.scheduler = torch.optim.lr_scheduler.StepLR(
            self.optimizer, step_size=CONFIG["step_size"], gamma=CONFIG["gamma"]
        )
        self.step = 0
        self.epoch = 0
        self.permutation: list[int] = []
        self.cursor = 0
        self.history: list[dict[str, Any]] = []
        self.model.train()

    def update(self) -> None:
        """Make one full update; no gradient is pending when it returns."""
        rows = self._next_rows()
        gain = 1.0 + CONFIG["gain"] * (2.0 * random.random() - 1.0)  # noqa: S311
        noise = CONFIG["noise"] * self.generator.standard_normal((len(rows), CONFIG["variables"]))
        lr = self.learning_rate()
        inputs = self.x[rows] * gain + torch.from_numpy(noise)
        loss = torch.nn.functional.mse_loss(self.model(inputs), self.y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        value = float(loss.detach())
        entry = {"step": self.step, "rows": rows, "gain": gain, "lr": lr, "loss": value}
        self.history.append(entry)

    def _next_rows(self) -> list[int]:
        if self.cursor == len(self.permutation):
            self.permutation = [int(row) for row in self.generator.permutation(CONFIG["rows"])]
            self.cursor = 0
            self.epoch += 1
        rows = self.permutation[self.cursor : self.cursor + CONFIG["batch_size"]]
        self.cursor += len(rows)
        return rows

    def learning_rate(self) -> float:
        """Return the learning rate that the next update will use."""
        return float(self.optimizer.param_groups[0]["lr"])

    def evaluate(self) -> float:
        """Return the mean squared error over all rows, without dropout, gain or noise."""
        self.model.eval()
        with torch.no_grad():
            error = float(torch.nn.functional.mse_loss(self.model(self.x), self.y))
        self.model.train()
        return error

    def next_draws(self) -> dict[str, list[float]]:
        """Return what each generator would draw next; none has moved."""
        return observe_draws(self.generator)

    def state(self) -> dict[str, Any]:
        """Return everything that the next update depends on, all of this one instant.

        Raises:
            RuntimeError: Gradients are pending: this isn't a closed boundary.
        """
        if any(parameter.grad is not None for parameter in self.model.parameters()):
            raise RuntimeError("gradients are pending: state is only read after a full update")
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": dict(self.scheduler.state_dict()),
            "progress": {"step": self.step, "epoch": self.epoch},
            "data": {"permutation": list(self.permutation), "cursor": self.cursor},
            "history": list(self.history),
            "rng": read_rng(self.generator),
        }

    def restore(self, state: dict[str, Any], *, omit_rng: bool = False) -> None:
        """Go on where ``state`` was taken: model, scheduler, optimizer, data, and RNG last.

        Args:
            state: What `state` returned, already checked.
            omit_rng: Leave the generators where a new process has them, which must be noticed.
        """
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["progress"]["step"]
        self.epoch = state["progress"]["epoch"]
        self.permutation = list(state["data"]["permutation"])
        self.cursor = state["data"]["cursor"]
        self.history = list(state["history"])
        self.model.train()
        if not omit_rng:
            restore_rng(state["rng"], self.generator)
