"""What ranks announce to each other: its number, its text, and the text of a disagreement (pure)."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.consensus.intents import (
    Announced,
    Intent,
    disagreement,
    joined_by_idle,
    layouts_differ,
    notes_differ,
    returned_early,
    transfer,
)

GRADIENTS, EDGE, IDLE = Announced(Intent.GRADIENTS), Announced(Intent.EDGE, 1), Announced(Intent.IDLE, 1)


@given(st.sampled_from(Intent), st.integers(0, 255), st.integers(0, 2**40 - 1))
def test_a_code_tells_everything_and_is_exact_in_float64(intent: Intent, index: int, detail: int) -> None:
    what = Announced(intent, index, detail)
    assert 0 < what.code < 2**52 and Announced.from_code(int(float(what.code))) == what


def test_codes_tell_kinds_numbers_and_details_apart() -> None:
    kinds = itertools.product(Intent, (0, 1, 255), (0, 1, 2**40 - 1))
    codes = [Announced(*each).code for each in kinds]
    assert len(set(codes)) == len(codes) == 9 * len(Intent)
    assert Announced(Intent.EDGE, 256).code == Announced(Intent.EDGE, 0).code, "deeper loops share numbers"
    named = Announced(Intent.GRADIENTS, strategy="powersgd")
    assert named.code == GRADIENTS.code and named != GRADIENTS, "the name is no part of what must be equal"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (Announced(Intent.GRADIENTS, 2, 0xAB), "reduces the gradients of model 2 (layout 00000000ab) in a backward pa"),
        (Announced(Intent.GRADIENTS, 0, 1, "fp16"), "reduces the gradients of model 0 under strategy 'fp16' (layout 0"),
        (Announced(Intent.EDGE, 1), "has come to the end of a step"),
        (Announced(Intent.EDGE, 3), "has come to the end of a step of a loader nested 2 deep"),
        (
            Announced(Intent.EDGE, 1, 7),
            "has come to the end of a step, and averages models or ends its pass (00000",
        ),
        (Announced(Intent.END_OF_PASS, 0, 9), "ends its pass over a loader, or left it (buffers 0000000009)"),
        (Announced(Intent.BUFFERS, 0, 9), "brings the buffers of its models along (layout 0000000009)"),
        (Announced(Intent.ROWS, 1, 4 * 5 + 1), "fetches rows of ShardedEmbedding 5 of model 1"),
        (Announced(Intent.ROWS, 1, 4 * 5 + 2), "fetches the whole of ShardedEmbedding 5 of model 1"),
        (Announced(Intent.ROWS, 1, 4 * 5 + 3), "loads ShardedEmbedding 5 of model 1"),
        (Announced(Intent.UPDATE, 1, 1), "divides the optimizer state of model 1 anew"),
        (
            Announced(Intent.UPDATE, 1, 2 * 0xC),
            "steps the optimizer of model 1 (which parameters have a gradient, and learning rates: 0000000c)",
        ),
        (Announced(Intent.STATE, 1), "calls optimizer.state_dict() of model 1, whose state lies with several ranks"),
        (Announced(Intent.SHARDS, 1, 0), "calls model 1, whose parameters lie with several ranks"),
        (
            Announced(Intent.SHARDS, 1, 4 * 3),
            "runs out of memory in an evaluation, and calls model 1, whose parameters lie with several ranks, in 3",
        ),
        (Announced(Intent.SHARDS, 1, 1), "gathers or reduces another part of model 1, whose parameters lie with"),
        (
            Announced(Intent.SHARDS, 1, 2),
            "asks for the whole state (call state_dict() on all ranks; the first one gets",
        ),
        (
            Announced(Intent.SHARDS, 1, 4 * 0xD + 3),
            "steps the optimizer of model 1, whose parameters lie with several ranks (which parameters have a gradient",
        ),
        (Announced(Intent.IDLE), "has no sample in it, and waits at its end"),
        (Announced(Intent.GATHER, 1, 6), "gathers part 6 of model 1, whose parameters lie with several ranks"),
        (
            Announced(Intent.COLLECTIVE, 2, 8, "gather"),
            "makes a collective of its own, number 2 between steps (gather:",
        ),
        (Announced(Intent.COLLECTIVE, 0, 8), "makes a collective of its own, within the step (which: 0000000008)"),
        (Announced(Intent.PLAN), "begins, or continues in a new group, a pass over a loader"),
        (Announced(Intent.FINISH), "has returned from the train function"),
        (
            transfer(2, 32767, received=True, in_vain=True),
            "waits to receive a message from rank 2 (tag 32767), which t",
        ),
        (transfer(2, 1, received=False), "waits to send a message to rank 2 (tag 1), which that rank has not asked"),
    ],
)
def test_an_announcement_says_in_words_what_a_rank_does(what: Announced, text: str) -> None:
    assert str(what).startswith(text)
    assert bool(re.search(r"learning rates: 0000000[cd]\)$", str(what))) == text.startswith("steps the optimizer")


@pytest.mark.parametrize("intent", Intent)
def test_every_kind_of_announcement_has_words_of_its_own(intent: Intent) -> None:
    others = {str(Announced(each)) for each in Intent if each is not intent}
    assert str(Announced(intent)) not in others


def test_a_disagreement_names_the_ranks_and_their_step() -> None:
    told = disagreement([GRADIENTS.code, EDGE.code, GRADIENTS.code], [7, 7, 7])
    assert told.startswith("the ranks do different things in step 7 (steps of all loaders counted), so that")
    assert "matched: ranks 0, 2 reduces the gradients of model 0" in told
    assert "; rank 1 has come to the end of a step. Every rank must" in told
    assert " after 7 steps" not in told and "Layouts" not in told


def test_a_disagreement_tells_differing_steps_and_who_is_silent() -> None:
    told = disagreement([EDGE.code, 0, EDGE.code], [8, 7, 8])
    assert "in step 7 " in told and "ranks 0, 2 has come to the end of a step after 8 steps" in told
    assert "rank 1 has announced nothing after 7 steps" in told


def test_a_disagreement_of_many_ranks_names_eight() -> None:
    told = disagreement([EDGE.code] * 10 + [GRADIENTS.code], [1] * 11)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more has" in told
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 has" in disagreement([EDGE.code] * 8 + [GRADIENTS.code], [1] * 9)


def test_layouts_differ_only_between_gradients_of_one_model() -> None:
    one, other = Announced(Intent.GRADIENTS, 0, 1), Announced(Intent.GRADIENTS, 0, 2)
    second = Announced(Intent.GRADIENTS, 1, 2)
    assert layouts_differ([one.code, other.code]) and layouts_differ([one.code, 0, second.code, other.code])
    assert not layouts_differ([one.code, second.code, 0]) and not layouts_differ([one.code, one.code])
    assert not layouts_differ([Announced(Intent.EDGE, 0, 1).code, Announced(Intent.EDGE, 0, 2).code])
    told = disagreement([one.code, other.code], [1, 1], ["fp16", "powersgd"])
    assert "rank 0 reduces the gradients of model 0 under strategy 'fp16'" in told
    assert "rank 1 reduces the gradients of model 0 under strategy 'powersgd'" in told
    assert ". Layouts differ with the strategy, which every rank must set alike" in told


def test_tensors_of_unlike_shares_are_told_the_way_out() -> None:
    def told(*calls: str) -> str:
        codes = [Announced(Intent.COLLECTIVE, 0, number).code for number in range(len(calls))]
        return disagreement(codes, [1] * len(calls), calls)

    assert "Pad the tensors to one shape" in told("all_gather(float32[3, 3], 0)", "all_gather(float32[2, 3], 0)")
    assert "Pad" not in told("all_gather(float32[3, 3], 0)", "broadcast(float32[3, 3], 0)")


@pytest.mark.parametrize(
    ("found", "joins"),
    [
        (Announced(Intent.EDGE, 1, 5), True),
        (Announced(Intent.EDGE, 1, 6), False),
        (Announced(Intent.EDGE, 2, 5), False),
        (Announced(Intent.SHARDS, 0, 0), True),
        (Announced(Intent.SHARDS, 0, 1), False),
        (Announced(Intent.SHARDS, 0, 4), False),
        (Announced(Intent.ROWS, 0, 1), True),
        (Announced(Intent.ROWS, 0, 4 * 3 + 1), True),
        (Announced(Intent.ROWS, 0, 2), False),
        (Announced(Intent.GATHER, 0, 3), True),
        (Announced(Intent.GRADIENTS), False),
        (Announced(Intent.COLLECTIVE), False),
    ],
)
def test_ranks_without_samples_join_calls_gathers_fetches_and_ends(found: Announced, joins: bool) -> None:
    end = Announced(Intent.IDLE, 1, 5)
    assert joined_by_idle([found.code, end.code, end.code]) == (found if joins else None)
    assert joined_by_idle([found.code, end.code, 0]) is None, "one has announced nothing"
    assert joined_by_idle([found.code, found.code]) is None, "all have samples"
    assert joined_by_idle([end.code, end.code]) is None, "none has"
    assert joined_by_idle([found.code, GRADIENTS.code, EDGE.code, end.code]) is None, "they do different things"
    assert joined_by_idle([found.code, end.code, Announced(Intent.IDLE, 3).code]) is None, "they wait at different ends"


@pytest.mark.parametrize(("idle", "have", "workers"), [(2, 1, "1 worker here"), (1, 2, "2 workers here")])
def test_what_needs_sample_everywhere_says_how_many_have_one(idle: int, have: int, workers: str) -> None:
    told = disagreement([GRADIENTS.code] * have + [IDLE.code] * idle, [4] * 3)
    assert told.startswith(f"step 4 (steps of all loaders counted) has samples for {have} of 3 workers, and these do")
    assert f"use at most {workers}, more samples, or drop_last=True" in told


def test_gradients_that_some_ranks_add_to_are_told() -> None:
    told = notes_differ([0, 1, 0], 12)
    assert told.startswith("the ranks do different things in step 12 (steps of all loaders counted), so that")
    assert "ranks 0, 2 reduces gradients; rank 1 reduces gradients, on top of those of the last update" in told


def test_a_rank_that_returned_early_is_told_to_others() -> None:
    told = returned_early(1, 5, 0, 6)
    assert "in step 6 (" in told and "rank 1 has returned from the train function after 5 steps; rank 0 begins" in told
