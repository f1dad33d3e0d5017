"""TRL's SFTTrainer as an elastic job, by the mixin: the same training as in one process. TRL is in no extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loop.changing import Change, Kill, run_job

trl = pytest.importorskip("trl")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402

from elastic_ray.integrations.huggingface import ElasticTrainerMixin  # noqa: E402

TEXTS, BATCH, EPOCHS = 48, 8, 2
STEPS = TEXTS // BATCH

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_state_for_all")]


class Elastic(ElasticTrainerMixin, trl.SFTTrainer):  # type: ignore[name-defined]
    """What the docs say to write."""


def tuned(kind: Any, folder: Path, **options: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What was logged, and the weights."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 12, (TEXTS,), generator=generator).tolist()
    texts = [" ".join(f"w{i}" for i in torch.randint(0, 29, (n,), generator=generator).tolist()) for n in lengths]
    transformers.set_seed(1)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    args = trl.SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_steps=3,
        disable_tqdm=True,
        learning_rate=0.1,
        optim="sgd",
        max_length=16,
        gradient_checkpointing=False,
        bf16=False,
        train_sampling_strategy="sequential",
        **options,
    )
    model = transformers.GPT2LMHeadModel(config)
    rows = datasets.Dataset.from_dict({"text": texts})
    trainer = kind(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    log = [
        {name: round(value, 4) for name, value in each.items() if "runtime" not in name and "_per_" not in name}
        for each in trainer.state.log_history
    ]
    return log, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"packing": True}])
def test_alone_it_is_theirs(options: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = (tuned(kind, tmp_path, **options) for kind in (trl.SFTTrainer, Elastic))
    assert ours[0] == theirs[0]
    for name, value in theirs[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("script", "first"),
    [((Change(3, (1, 2, 3)), Change(STEPS + 3, (1, 2))), (1,)), ((Kill(2, 2, "backward"),), (1, 2, 3))],
)
def test_through_changes_it_is_theirs(script: Any, first: Any, tmp_path: Path) -> None:
    _, theirs = tuned(trl.SFTTrainer, tmp_path)
    for _, weights in run_job(lambda: tuned(Elastic, tmp_path), script, first=first).results.values():
        for name, value in theirs.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
