"""Teacher-forced passes after an eviction equal what an engine computes."""

from dataclasses import replace

import pytest
import torch

from runtime.core.request import SamplingParams
from runtime.engine import Add
from runtime.errors import KVFormatError
from runtime.models.build import build_model
from runtime.offline.quality.attention import TeacherForced
from runtime.offline.quality.formats import format_factory
from runtime.offline.quality.measure import (
    Result,
    describe,
    logits_after_eviction,
    logits_of,
    measure,
)
from runtime.offline.quality.report import comparison_table, result_table
from tests.runtime.offline.quality import formats
from tests.runtime.tiny import CONFIG, drive, engine_of, prompt_of, request_of, tiny_checkpoint

TEXTS = torch.tensor([prompt_of(320, seed) for seed in (1, 2)])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["exact", "stream8", "int4"])
@pytest.mark.parametrize("length", [150, 160])
def test_logits_equal_those_of_an_engine(name: str, length: int) -> None:
    """Compare the log probabilities of what an engine generates after an eviction."""
    served = build_model(tiny_checkpoint(), kv_format="dense" if name == "exact" else name)
    sampling = SamplingParams(temperature=0.8, seed=3, logprobs=1)
    request = request_of("r", length, length, sampling=sampling)
    stored = 64 * served.layout.plan.encodes
    engine = engine_of(served, stored=stored, kv_eviction=0.5)
    output = drive(engine, Add(request)).tokens["r", 0]
    text = torch.tensor([*request.tokens, *(token.token for token in output)])
    model = build_model(tiny_checkpoint())
    teacher_forced = TeacherForced(CONFIG, format_factory(name)(CONFIG))
    logits = logits_after_eviction(model, text, TeacherForced(CONFIG, None), teacher_forced, 0.5)
    assert len(logits) == length
    found = logits.log_softmax(-1)[:-1].gather(1, text[length + 1 :, None])[:, 0]
    expected = torch.tensor([token.logprob for token in output[1:]])
    # fp32 sums in another order
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    kept = logits_of(model, text, teacher_forced)[length:]
    assert (
        kept.log_softmax(-1)[:-1].gather(1, text[length + 1 :, None])[:, 0] - expected
    ).abs().max() > 0.1


def measured(name: str, eviction: float) -> Result:
    spec = name if name in ("exact", "int4") else f"{formats.__name__}:{name}"
    inputs = describe("tiny", "tiny-0", "random", TEXTS)
    model = build_model(tiny_checkpoint())
    compressed = format_factory(spec)(CONFIG)
    return measure(model, {spec: compressed}, TEXTS, inputs, eviction=eviction)[0]


def test_larger_shares_change_more() -> None:
    exact, quarter, most = (measured("exact", share) for share in (1e-6, 0.25, 0.9))
    assert exact.quality.kl_mean == 0
    assert 0 < quarter.quality.kl_mean < most.quality.kl_mean
    assert quarter.inputs.first_scored == 160
    assert quarter.quality.positions == 2 * 159
    assert measured("int4", 0.25).quality.kl_mean > 0


def test_tables_name_the_share() -> None:
    result = measured("int4", 0.25)
    assert str(result_table(result).columns[1].header) == "int4, 25% evicted"
    both = comparison_table([result, replace(result, eviction=0.5)])
    assert list(both.columns[0].cells) == ["int4, 25% evicted", "int4, 50% evicted"]


def test_formats_that_do_not_keep_rope_are_refused() -> None:
    with pytest.raises(KVFormatError, match="test-int8 does not support kv_eviction"):
        measured("Int8", 0.5)
