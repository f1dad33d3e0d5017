"""Programs as strangers write them, with the few lines that make them elastic. What they return is for the tests."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import data

import elastic_ray as er

# -- neural collaborative filtering: negatives drawn anew, ranking over 100 candidates -------------------------------

USERS, ITEMS, NEGATIVES, CANDIDATES = 24, 200, 4, 100


class NCFData(data.Dataset[Any]):
    """Has no rows at all before `ng_sample`."""

    def __init__(self, features: list[tuple[int, int]], positives: set[tuple[int, int]]) -> None:
        self.features_ps = features
        self.positives = positives
        self.rounds = 0

    def ng_sample(self) -> None:
        """As in the original: random, not seeded, new in each epoch."""
        assert self.rounds < 1000
        self.features_ng = []
        for user, _ in self.features_ps:
            for _ in range(NEGATIVES):
                item = np.random.randint(ITEMS)  # noqa: NPY002
                while (user, item) in self.positives:
                    item = np.random.randint(ITEMS)  # noqa: NPY002
                self.features_ng.append((user, item))
        self.features_fill = self.features_ps + self.features_ng
        self.labels_fill = [1.0] * len(self.features_ps) + [0.0] * len(self.features_ng)
        self.rounds += 1

    def __len__(self) -> int:
        return (NEGATIVES + 1) * len(self.features_ps)

    def __getitem__(self, index: int) -> tuple[int, int, float, int]:
        user, item = self.features_fill[index]
        return user, item, self.labels_fill[index], self.rounds


class NCF(nn.Module):
    """Matrix factorisation with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.predict = nn.Linear(8, 1)

    def forward(self, user: torch.Tensor, item: torch.Tensor) -> torch.Tensor:
        return self.predict(self.users(user) * self.items(item)).view(-1)


def ncf(config: dict[str, Any]) -> dict[str, Any]:
    """Trains, and after each epoch ranks one held-out item of each user among 99 others."""
    torch.manual_seed(0)
    positives = [(user, (user * 7 + 3 * n) % ITEMS) for user in range(USERS) for n in range(6)]
    train_dataset = NCFData(positives, set(positives))
    test_items = [(user, (user * 7 + 18 + other) % ITEMS) for user in range(USERS) for other in range(CANDIDATES)]
    train_loader = er.AdaptiveDataLoader(data.DataLoader(train_dataset, batch_size=48, shuffle=True, num_workers=2))
    test_loader = er.AdaptiveDataLoader(
        data.DataLoader(data.TensorDataset(torch.tensor(test_items)), batch_size=CANDIDATES, num_workers=1),
        whole_batches=True,
    )
    net = NCF()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(net, optimizer)
    found: dict[str, Any] = {"rounds": [], "lists": []}
    for epoch in er.remaining_epochs_until(int(config["epochs"])):
        train_loader.dataset.ng_sample()
        model.train()
        seen = er.Accumulator()
        for user, item, label, rounds in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), label.float())
            loss.backward()
            optimizer.step()
            assert set(rounds.tolist()) == {train_loader.dataset.rounds}, "stale negatives"
            seen["samples"] += len(user)
            seen["positives"] += label.sum().item()
            time.sleep(float(config.get("pause_s", 0)))  # a job long enough for what is done to it
        model.eval()
        metrics = er.Accumulator()
        with torch.no_grad():
            for (pairs,) in test_loader:
                scores = model(pairs[:, 0], pairs[:, 1])
                assert len(set(pairs[:, 0].tolist())) == 1 and len(pairs) == CANDIDATES
                rank = int((scores > scores[0]).sum())
                metrics["HR"] += float(rank < 10)
                metrics["NDCG"] += 1 / math.log2(rank + 2) if rank < 10 else 0.0
                metrics["users"] += 1
                time.sleep(float(config.get("pause_s", 0)))  # a job long enough for what is done to it
        assert metrics["users"] == USERS and seen["samples"] == len(train_dataset), "whatever has changed meanwhile"
        er.report(
            {
                "HR": metrics["HR"] / USERS,
                "users": metrics["users"],
                "samples": seen["samples"],
                "positives": seen["positives"],
                "workers": er.get_context().get_world_size(),
                "epoch": epoch,
            }
        )
        found["lists"].append((metrics["users"], metrics["HR"], metrics["NDCG"]))
        found["rounds"].append((seen["samples"], seen["positives"]))
    return {**found, "weights": _digest(net)}


# -- a word-level language model with a state that continues from batch to batch ---------------------------------------

STREAMS, BPTT, CHUNKS, WORDS = 6, 8, 10, 12


class Corpus(data.Dataset[Any]):
    """`batchify`d text: item chunk * STREAMS + stream."""

    def __init__(self) -> None:
        period = torch.arange(STREAMS * BPTT * CHUNKS + 1) % WORDS  # predictable
        self.source = torch.stack([period[i * BPTT * CHUNKS :][: BPTT * CHUNKS + 1] for i in range(STREAMS)])

    def __len__(self) -> int:
        return STREAMS * CHUNKS

    def __getitem__(self, index: int) -> tuple[int, int, torch.Tensor, torch.Tensor]:
        chunk, stream = divmod(index, STREAMS)
        piece = self.source[stream, chunk * BPTT : (chunk + 1) * BPTT + 1]
        return stream, chunk, piece[:-1], piece[1:]


class RNNModel(nn.Module):
    """Embedding, LSTM, decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.rnn = nn.LSTM(16, 16, batch_first=True)

    def forward(self, words: torch.Tensor, hidden: Any) -> Any:
        output, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(output), hidden


def language(config: dict[str, Any]) -> dict[str, Any]:
    """Truncated backpropagation through time, gradients clipped."""
    torch.manual_seed(0)
    net = RNNModel()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    model = er.AdaptiveDataParallel(net, optimizer)
    loader = er.AdaptiveDataLoader(data.DataLoader(Corpus(), batch_size=STREAMS))
    zeros = torch.zeros(16)
    losses, carried = [], 0
    for _epoch in er.remaining_epochs_until(int(config["epochs"])):
        states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        totals = er.Accumulator()
        for streams, chunk, words, targets in loader:
            assert len(set(chunk.tolist())) == 1, "a step is one chunk of all streams"
            carried += sum(stream in states for stream in streams.tolist())
            known = [states.get(stream, (zeros, zeros)) for stream in streams.tolist()]
            hidden = tuple(torch.stack(part)[None] for part in zip(*known, strict=True))
            optimizer.zero_grad()
            output, (h, c) = model(words, hidden)
            loss = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            states = {s: (h[0, i].detach(), c[0, i].detach()) for i, s in enumerate(streams.tolist())}
            totals["loss"] += loss.item() * len(streams)
            totals["chunks"] += len(streams)
            time.sleep(float(config.get("pause_s", 0)))  # a job long enough for what is done to it
        assert totals["chunks"] == STREAMS * CHUNKS, "whatever has changed meanwhile"
        losses.append(totals["loss"] / totals["chunks"])
        er.report({"loss": losses[-1], "chunks": totals["chunks"], "workers": er.get_context().get_world_size()})
    return {"losses": losses, "carried": carried, "weights": _digest(net)}


# -- cross-validation of a model whose evaluated weights are an average ------------------------------------------------


class WithAverage(nn.Module):
    """The net, and the average that evaluations use."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.net, self.ema = net, torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=average).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) if self.training else self.ema(x)


def averaged_folds(config: dict[str, Any]) -> dict[str, Any]:
    """Three folds in one run: their models are wrapped first, the epochs are divided among them."""
    torch.manual_seed(0)
    x = torch.randn(90, 6)
    everything = data.TensorDataset(x, (x.sum(1) > 0).long())
    folds: list[Any] = []
    for fold in range(3):
        module = WithAverage(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)))
        optimizer = torch.optim.SGD(module.net.parameters(), lr=0.2)
        optimizer.register_step_post_hook(lambda *_, module=module: module.ema.update_parameters(module.net))
        training = data.Subset(everything, [i for i in range(90) if i % 3 != fold])
        held_out = data.Subset(everything, [i for i in range(90) if i % 3 == fold])
        folds.append(
            (
                er.AdaptiveDataParallel(module, optimizer),
                optimizer,
                er.AdaptiveDataLoader(data.DataLoader(training, batch_size=12, shuffle=True)),
                er.AdaptiveDataLoader(data.DataLoader(held_out, batch_size=10)),
            )
        )
    epochs, accuracies, samples = int(config["epochs"]), {}, {}
    for count in er.remaining_epochs_until(3 * epochs):
        fold, _epoch = divmod(count, epochs)
        model, optimizer, loader, evaluation = folds[fold]
        model.train()
        seen = er.Accumulator()
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            seen["samples"] += len(labels)
            time.sleep(float(config.get("pause_s", 0)))  # a job long enough for what is done to it
        model.eval()
        hits = er.Accumulator()
        with torch.no_grad():
            for features, labels in evaluation:
                hits["right"] += (model(features).argmax(1) == labels).sum().item()
        accuracies[fold], samples[count] = hits["right"] / 30, seen["samples"]
        workers = er.get_context().get_world_size()
        er.report({"accuracy": accuracies[fold], "samples": seen["samples"], "fold": fold, "workers": workers})
    return {
        "accuracies": accuracies,
        "samples": list(samples.values()),
        "weights": [_digest(model.module) for model, *_ in folds],
        "moved": [not torch.equal(m.module.net[0].weight, m.module.ema.module[0].weight) for m, *_ in folds],
    }


def _digest(module: nn.Module) -> list[float]:
    return [float(value.double().sum()) for value in module.state_dict().values()]
