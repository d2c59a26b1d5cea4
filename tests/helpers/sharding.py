"""One small model divided among ranks in every way that torch has.

Weights are set before torch divides them, moments from each weight's own part, so what a rank must
hold after a restore is what a fresh instance holds that torch has divided: nothing here asks the
library where a part lies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

KINDS = ("ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "zero")


class Net(nn.Module):
    """Dims of 7, 1 and 5, a tied head, bfloat16 and float32, a frozen weight, buffers."""

    table: torch.Tensor
    seen: torch.Tensor
    count: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 13)
        self.thin = nn.Linear(3, 7, dtype=torch.bfloat16)
        self.down = nn.Linear(13, 5)
        self.one = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(2, 7, 3))
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.randn(7, 2))
        self.register_buffer("seen", torch.zeros(7))
        self.register_buffer("count", torch.tensor(0))


#: Which dim tensor parallel cuts; the rest is replicated.
_CUT = {
    "embed.weight": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1, "thin.weight": 1, "cube": 1,
}  # fmt: skip


class Divided:
    """The model and its optimizers on this rank, divided in one way.

    Args:
        kind: One of `KINDS`.
        seed: Of the values before they are divided.
    """

    def __init__(self, kind: str, seed: int) -> None:
        from torch.distributed import get_rank, get_world_size

        world = get_world_size()
        self.net = Net(seed)
        self.model: nn.Module = self.net
        halves = (2, world // 2) if world % 2 == 0 else (1, world)
        if kind == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.net)
        elif kind == "fsdp":
            self._shard(_mesh((world,), ("dp",)))
        elif kind == "hsdp":
            self._shard(_mesh(halves, ("replicate", "shard")))
        elif kind == "tp":
            self._parallelize(_mesh((world,), ("tp",)))
        elif kind == "fsdp_tp":
            grid = _mesh(halves[::-1], ("dp", "tp"))
            self._parallelize(grid["tp"])
            self._shard(grid["dp"])
        named = self.net.named_parameters()
        trained = {n: p for n, p in named if p.requires_grad and not n.startswith("thin")}
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in trained.items() if n.endswith("weight")], "lr": 0.5},
            {"params": [p for n, p in trained.items() if not n.endswith("weight")], "lr": 0.25},
        ]
        # ZeRO takes one dtype only, so every kind has two optimizers.
        wide: torch.optim.Optimizer
        if kind == "zero":
            from torch.distributed.optim import ZeroRedundancyOptimizer

            wide = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, betas=(0.8, 0.9))
        else:
            wide = torch.optim.AdamW(groups, betas=(0.8, 0.9))
        thin = torch.optim.AdamW(self.net.thin.parameters(), lr=0.125)
        self.optimizers = {"wide": wide, "thin": thin}
        with torch.no_grad():
            self.net.seen.fill_(seed + get_rank())
            self.net.count.fill_(100 * seed + get_rank())

    def _shard(self, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net.thin, mesh=mesh)  # of another dtype: a group of its own
        fully_shard(self.net, mesh=mesh)

    def _parallelize(self, mesh: Any) -> None:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        cut: dict[int, nn.Parameter] = {}
        for name, parameter in list(self.net.named_parameters()):
            placed = [Shard(_CUT[name])] if name in _CUT else [Replicate()]
            tensor = distribute_tensor(parameter.detach(), mesh, placed, src_data_rank=None)
            cut[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        # A buffer that ranks share: one global tensor, where the other kinds have a copy each.
        self.net.table = distribute_tensor(self.net.table, mesh, [Shard(0)], src_data_rank=None)
        for module in self.net.modules():
            for name, held in module._parameters.items():
                if held is not None:
                    module._parameters[name] = cut[id(held)]

    def fill(self) -> None:
        """The optimizers have the state of one update, each moment made from its weight."""
        with torch.no_grad():
            kept = {p: _local(p).clone() for p in self.net.parameters()}
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        with torch.no_grad():
            for parameter, values in kept.items():
                _local(parameter).copy_(values)
                state = self.state_of(parameter)
                if state:
                    _local(state["exp_avg"]).copy_(values * 3)
                    _local(state["exp_avg_sq"]).copy_(values * values)
                    state["step"].fill_(41)

    def state_of(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return a parameter's optimizer state on this rank."""
        found: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers.values():
            found.update(getattr(optimizer, "optim", optimizer).state.get(parameter, {}))
        return found

    def held(self) -> dict[str, bytes]:
        """Return the bytes of everything that this rank holds and all kinds have."""
        found = {"table": _bytes(self.net.table)}
        for name, parameter in self.net.named_parameters():
            found[name] = _bytes(parameter)
            for key, value in self.state_of(parameter).items():
                found[f"{name}/{key}"] = _bytes(value)
        return found

    def lrs(self) -> list[float]:
        """Return each group's learning rate."""
        return [g["lr"] for o in self.optimizers.values() for g in o.param_groups]


def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _bytes(tensor: Any) -> bytes:
    local = _local(tensor).contiguous().reshape(-1)
    return local.view(torch.uint8).numpy().tobytes() if local.numel() else b""


def canonical(seed: int) -> dict[str, torch.Tensor]:
    """Return what the three arrays of the .bin must hold, from the undivided model."""
    net = Net(seed)
    rows: dict[str, list[torch.Tensor]] = {"weights": [], "m": [], "v": []}
    for parameter in net.parameters():
        values = parameter.detach()
        rows["weights"].append(values.float().reshape(-1))
        zero = torch.zeros_like(values)
        rows["m"].append((values * 3 if parameter.requires_grad else zero).float().reshape(-1))
        rows["v"].append((values * values if parameter.requires_grad else zero).float().reshape(-1))
    return {name: torch.cat(parts) for name, parts in rows.items()}
