"""A GPT: token and position embeddings, pre-norm blocks of attention and MLP, an output head.

The order of the parameters is the order of ``step_N.bin``: embeddings, then attention and MLP of
each layer, then the head. The norms are RMS norms without weights and nothing has a bias, so
matrices are all there is to save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_BYTES = 256
START = 256
"""The token between two texts, where a sample starts; the other 256 tokens are the bytes."""
VOCABULARY = NUM_BYTES + 1


@dataclass(frozen=True)
class GPTConfig:
    """The dimensions of one network."""

    num_layers: int
    num_heads: int
    width: int
    context: int
    vocabulary: int = VOCABULARY
    dropout: float = 0.1
    tied: bool = False
    """Whether the head uses the token embedding's matrix."""


PRESETS = {
    # 467,200 parameters: a few milliseconds a step on one core
    "tiny": GPTConfig(num_layers=2, num_heads=4, width=128, context=64),
    # 12,780,288 parameters, a step_N.bin of 153,363,464 bytes
    "andrea-12m": GPTConfig(num_layers=7, num_heads=6, width=384, context=512),
    # 120,030,592 parameters, a step_N.bin of 1.44 GB
    "andrea-120m": GPTConfig(num_layers=20, num_heads=11, width=704, context=1024),
}


class Attention(nn.Module):
    """Causal attention over several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position gathers from those before it; (batch, time, width) both."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3 * self.num_heads, width // self.num_heads)
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, time, width))
        return mixed


class MLP(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return each position's update; (batch, time, width) both."""
        down: Tensor = self.down(F.gelu(self.up(x)))
        return down


class Block(nn.Module):
    """One layer: attention, then MLP, each normed before and added after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this layer; (batch, time, width) both."""
        x = x + self.dropout(self.attention(_norm(x)))
        after: Tensor = x + self.dropout(self.mlp(_norm(x)))
        return after


class GPT(nn.Module):
    """The network. `num_params` counts each parameter once, tied ones too."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self._initialise()
        if config.tied:
            self.head.weight = self.token_embedding.weight

    def _initialise(self) -> None:
        """Draw all weights; what adds to the residual stream starts smaller in deep networks."""
        for name, weight in self.named_parameters():
            deep = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.num_layers) if deep else 0.02
            nn.init.normal_(weight, std=std)

    @property
    def num_params(self) -> int:
        """How many numbers ``step_N.bin`` holds three times."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token.

        (batch, time) int64 in, (batch, time, vocabulary) out.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(_norm(x))
        return logits


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))
