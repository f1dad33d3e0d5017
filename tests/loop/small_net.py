"""A small net, and the rows that it learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SAMPLES, BATCH, EPOCHS, EVERY = 48, 8, 2, 4


STEPS = SAMPLES // BATCH * EPOCHS


def net() -> nn.Module:
    """The same small model each time; torch's own generator belongs to all threads."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.6, p.numel(), dtype=torch.float64).reshape(p.shape) + 0.03 * number)
    return model


def rows() -> torch.utils.data.TensorDataset:
    """Fixed rows."""
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64))


def weights(model: nn.Module) -> Tensor:
    """All parameters, flat."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
