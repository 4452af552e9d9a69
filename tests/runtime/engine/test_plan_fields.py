"""Fields of step plans that are sent to other ranks."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.request import SamplingParams
from runtime.engine.plan_fields import NOT_READ, SENT, WordReader, add_sampling, read_sampling

REALS = st.floats(allow_nan=False)
TOKENS = st.integers(0, 1 << 31)


@pytest.mark.parametrize("part", SENT, ids=lambda part: part.__name__)
def test_every_field_is_sent_or_declared_as_not_read(part: type) -> None:
    names = [field.name for field in fields(part)]
    assert sorted([*SENT[part], *NOT_READ[part]]) == sorted(names)
    assert SENT.keys() == NOT_READ.keys()


@given(
    sampling=st.builds(
        SamplingParams,
        temperature=REALS,
        top_p=REALS,
        top_k=TOKENS,
        min_p=REALS,
        seed=st.integers(-(1 << 63), (1 << 63) - 1),
        presence_penalty=REALS,
        frequency_penalty=REALS,
        repetition_penalty=REALS,
        logit_bias=st.dictionaries(TOKENS, REALS, max_size=5),
        logprobs=st.none() | st.integers(0, 20),
        prompt_logprobs=st.none() | st.integers(0, 20),
        min_tokens=TOKENS,
        suppressed=st.frozensets(TOKENS, max_size=5),
        allowed_token_ids=st.frozensets(TOKENS, max_size=5),
        bad_words=st.lists(st.lists(TOKENS, max_size=4).map(tuple), max_size=4).map(tuple),
        constrained=st.booleans(),
    )
)
def test_sampling_parameters_are_sent_bit_for_bit(sampling: SamplingParams) -> None:
    words: list[int] = []
    add_sampling(words, sampling)
    reader = WordReader(np.array(words, np.int64).tolist())
    assert read_sampling(reader) == sampling
    assert reader.rest() == []


def test_seeds_keep_the_64_bits_that_draws_depend_on() -> None:
    words: list[int] = []
    add_sampling(words, SamplingParams(seed=(1 << 64) - 5))
    assert read_sampling(WordReader(words)).seed == -5
