"""Losses of averaged models beside all-reduce, at equal samples, through 2 -> 4 -> 3 workers and a kill.

scikit-learn's digits with SGD and with AdamW, and a small GPT over the characters of a text, with a cosine schedule;
the mean over three seeds of the loss over all training data. Workers are threads of one process over gloo. Bar: within
1 % of all-reduce.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from common import bar, finish, side_parser  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import elastic_ray as er  # noqa: E402
from elastic_ray.sync import SMA, DiLoCo, LocalSGD, PairAveraging  # noqa: E402
from tests.loop.changing import Change, Kill, run_job  # noqa: E402

STRATEGIES: dict[str, Any] = {
    "all_reduce": "all_reduce",
    "local_sgd": LocalSGD(period=8, give_back=True),
    "diloco": DiLoCo(period=8, outer_lr=1.0, outer_momentum=0.0, give_back=True),
    "sma": SMA(),
    "pair": PairAveraging(period=8, give_back=True),
}
CONTEXT, WIDTH = 32, 32


class Gpt(nn.Module):
    """Two blocks of a causal transformer."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks, self.head = (
            nn.TransformerEncoder(block, 2, enable_nested_tensor=False),
            nn.Linear(WIDTH, characters),
        )
        self.register_buffer("mask", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character at each place."""
        found: Tensor = self.head(self.blocks(self.tokens(x) + self.places.weight, mask=self.mask, is_causal=True))
        return found.flatten(0, 1)


def digits() -> tuple[Callable[[], nn.Module], Tensor, Tensor, float, int]:
    """The model, inputs, targets, learning rate and epochs."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32)[:1440], torch.tensor(labels)[:1440]
    return lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), x, y, 2e-3, 8


def gpt() -> tuple[Callable[[], nn.Module], Tensor, Tensor, float, int]:
    """The same of a text."""
    text = (ROOT / "LICENSE").read_text()
    known = sorted(set(text))
    codes = torch.tensor([known.index(each) for each in text])
    windows = codes[: len(codes) // 7 * 7].unfold(0, CONTEXT + 1, 7)[:1440]
    return lambda: Gpt(len(known)), windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), 3e-3, 6


def digits_with_sgd() -> tuple[Callable[[], nn.Module], Tensor, Tensor, float, int]:
    """The same as :func:`digits`, for SGD with momentum."""
    make, x, y, _, epochs = digits()
    return make, x, y, 0.1, epochs


def train(task: Callable[[], Any], strategy: Any, seed: int, script: list[Any]) -> float:
    """Loss at the end over all data."""
    make, x, y, rate, epochs = task()
    torch.manual_seed(seed)
    start = make().state_dict()
    batch = 48
    steps = len(x) // batch * epochs

    def loop() -> nn.Module:
        model = make()
        model.load_state_dict(start)
        if task is digits_with_sgd:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        wrapped = er.AdaptiveDataParallel(
            model, optimizer, lr_scheduler=schedule, strategy=strategy, scaling_rule="none"
        )
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch, seed=seed)
        for _ in er.remaining_epochs_until(epochs):
            for inputs, targets in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(inputs), targets.flatten()).backward()
                optimizer.step()
                schedule.step()
        return model

    outcome = run_job(loop, script, first=(1, 2))
    model = next(iter(outcome.results.values()))
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y.flatten()))


def main() -> None:
    """All tasks, strategies and seeds."""
    options = side_parser(__doc__ or "", sides=False).parse_args()
    torch.set_num_threads(1)
    script = [Change(35, (1, 2, 3, 4)), Change(75, (1, 2, 3)), Kill(125, 2, "backward")]
    found = {
        (task.__name__, name): [train(task, strategy, seed, list(script)) for seed in range(1 if options.quick else 3)]
        for task in (digits_with_sgd, digits, gpt)
        for name, strategy in STRATEGIES.items()
    }
    rows = [
        {"task": task, "strategy": name, "loss": statistics.mean(losses), "by seed": [round(x, 4) for x in losses]}
        for (task, name), losses in found.items()
    ]
    bars = [
        bar(
            f"{task}: loss of {name} / all-reduce",
            value=statistics.mean(found[task, name]) / statistics.mean(found[task, "all_reduce"]),
            limit=1.01,
            at_least=False,
        )
        for task, name in found
        if name != "all_reduce"
    ]
    finish("round_losses", rows=rows, bars=bars)


if __name__ == "__main__":
    main()
