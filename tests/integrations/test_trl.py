"""TRL's SFTTrainer and DPOTrainer as elastic jobs, by the mixin: training as in one process. TRL is in no extra."""

from __future__ import annotations

import copy
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


class ElasticPreferences(ElasticTrainerMixin, trl.DPOTrainer):  # type: ignore[name-defined]
    """The same for preferences, with a reference model beside the trained one."""


def tuned(kind: Any, folder: Path, **options: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """What was logged, and the weights; by preferences where that is what the trainer learns from."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    generator = torch.Generator().manual_seed(0)

    def texts() -> list[str]:
        lengths = torch.randint(3, 6 if prefers else 12, (TEXTS,), generator=generator).tolist()
        return ["".join(f" w{i}" for i in torch.randint(0, 29, (n,), generator=generator).tolist()) for n in lengths]

    prefers = issubclass(kind, trl.DPOTrainer)
    columns = ("prompt", "chosen", "rejected") if prefers else ("text",)
    rows = datasets.Dataset.from_dict({name: texts() for name in columns})
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
    args = (trl.DPOConfig if prefers else trl.SFTConfig)(
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
    beside = {"ref_model": copy.deepcopy(model)} if prefers else {}
    trainer = kind(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **beside)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    log = [
        {name: round(value, 4) for name, value in each.items() if "runtime" not in name and "_per_" not in name}
        for each in trainer.state.log_history
    ]
    return log, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ((trl.SFTTrainer, Elastic), {}),
        ((trl.SFTTrainer, Elastic), {"packing": True}),
        ((trl.DPOTrainer, ElasticPreferences), {}),
    ],
)
def test_alone_it_is_theirs(kinds: Any, options: dict[str, Any], tmp_path: Path) -> None:
    theirs, ours = (tuned(kind, tmp_path, **options) for kind in kinds)
    assert ours[0] == theirs[0]
    for name, value in theirs[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=0)


@pytest.mark.parametrize("kinds", [(trl.SFTTrainer, Elastic), (trl.DPOTrainer, ElasticPreferences)])
@pytest.mark.parametrize(
    ("script", "first"),
    [((Change(3, (1, 2, 3)), Change(STEPS + 3, (1, 2))), (1,)), ((Kill(2, 2, "backward"),), (1, 2, 3))],
)
def test_through_changes_it_is_theirs(kinds: Any, script: Any, first: Any, tmp_path: Path) -> None:
    _, theirs = tuned(kinds[0], tmp_path)
    for _, weights in run_job(lambda: tuned(kinds[1], tmp_path), script, first=first).results.values():
        for name, value in theirs.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
