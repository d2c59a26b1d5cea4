"""Audit samples: a text that the network makes up, without a trace in the training."""

from __future__ import annotations

import torch

from andrea.model import GPT, NUM_BYTES, START


@torch.no_grad()
def generate(
    model: GPT, num_bytes: int = 200, *, seed: int, prompt: str = "", temperature: float = 0.8
) -> str:
    """Return `prompt` and up to `num_bytes` more, the same for the same weights and seed.

    It draws from a generator of its own and puts the network's mode back: training goes on as if
    it hadn't been called. Give it the bare model, not its DDP wrapper, and it needs no other rank.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    try:
        tokens = [START, *prompt.encode()]
        for _ in range(num_bytes):
            context = torch.tensor([tokens[-model.config.context :]], device=device)
            logits = model(context)[0, -1].float().cpu() / temperature
            token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
            if token == START:
                break
            tokens.append(token)
    finally:
        model.train(was_training)
    return bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
