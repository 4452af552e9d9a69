"""Chats for calibration and comparison."""

from dataclasses import replace

import pytest
import torch

from runtime.models.build import build_model
from runtime.offline.quality.generate import outputs_of
from runtime.offline.quality.metrics import compare
from services.common.model_source import resolve_model
from services.offline import chats
from services.offline.chats import (
    Chat,
    answer,
    as_text,
    compare_chats,
    is_loop,
    questions,
)
from services.tokenizer.loading import load_tokenizer
from tests.runtime.tiny import CONFIG, tiny_checkpoint

END = 2


def test_held_out_questions_are_not_used_for_calibration() -> None:
    calibration, held_out = questions()
    assert (len(calibration), len(held_out)) == (80, 40)
    assert len({*calibration, *held_out}) == 120


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([5] * 24, True),
        ([5] * 23, False),
        ([1, 3, 4] * 8, True),
        ([9, 8, 7, *([1, 3, 4] * 8)], True),
        ([*range(10, 30)] * 3, True),
        ([*range(10, 30)] * 2, False),
        ([*range(10, 100)], False),
        ([*([5] * 40), 6], False),
        ([*([5] * 40), END], False),
        ([], False),
    ],
)
def test_answer_that_repeats_until_it_is_cut_off_is_a_loop(tokens: list[int], loop: bool) -> None:
    assert is_loop(tokens, [END]) is loop


@pytest.mark.slow
def test_prompt_is_rendered_with_the_chat_template() -> None:
    """The text of calibration is what the service computes for a chat."""
    path = resolve_model("smollm2-135m")
    tokenizer = load_tokenizer(path)
    checkpoint = tiny_checkpoint(config=replace(CONFIG, vocab_size=tokenizer.vocab_size))
    made = answer(build_model(checkpoint), tokenizer, ["What is gravity?"], 3)
    [chat] = made
    text = tokenizer.decode(chat.prompt, skip_special=False)
    assert text.endswith("<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n")
    assert as_text(made) == [*chat.prompt, *chat.answer]
    assert 1 <= len(chat.answer) <= 3


def test_equal_models_agree_and_others_do_not() -> None:
    dense, other = (build_model(tiny_checkpoint(seed=seed)) for seed in (0, 1))
    made = [Chat([1, 5, 9, 4], [7, 3, 8, 8, 1, 5]), Chat([3, 6], [4, 4, 7])]
    same = compare_chats(dense, dense, made, 4)
    assert same.top1 == 1.0
    assert same.kl_mean == pytest.approx(0.0, abs=1e-9)
    different = compare_chats(dense, other, made, 4)
    assert different.top1 < 1.0
    assert different.kl_mean > 0.01
    assert different.chats == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_models_on_a_gpu_are_compared() -> None:
    dense, same, other = (
        build_model(tiny_checkpoint(seed=seed), device="cuda", dtype=torch.bfloat16)
        for seed in (0, 0, 1)
    )
    prompts = [[1, 5, 9, 4], [3, 6]]
    made = [Chat(*pair) for pair in zip(prompts, outputs_of(dense, prompts, 6), strict=True)]
    assert compare_chats(dense, same, made, 4).top1 == 1.0
    assert compare_chats(dense, other, made, 4).top1 < 1.0


def test_only_positions_of_the_answer_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one predicts the first token of the answer."""
    compared: list[list[int]] = []

    def record(baseline: torch.Tensor, other: torch.Tensor, tokens: torch.Tensor) -> object:
        compared.append(tokens.tolist())
        return compare(baseline, other, tokens)

    monkeypatch.setattr(chats, "compare", record)
    model = build_model(tiny_checkpoint())
    compare_chats(model, model, [Chat([1, 5, 9, 4], [7, 3])], 2)
    assert compared == [[4, 7, 3]]
