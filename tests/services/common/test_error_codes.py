"""The verdicts on error codes of workers."""

import pytest

from headrace.v1 import error_pb2
from services.common.error_codes import VERDICTS, Cause, Verdict, error_reason


def test_every_error_code_has_a_verdict() -> None:
    assert set(VERDICTS) == set(error_pb2.ErrorCode.values())


@pytest.mark.parametrize("code", error_pb2.ErrorCode.values())
def test_errors_end_exactly_the_requests_that_caused_them(
    code: "error_pb2.ErrorCode.ValueType",
) -> None:
    verdict = VERDICTS[code]
    assert (verdict.error is not None) is (verdict.cause is Cause.REQUEST)


def test_only_faults_and_losses_of_workers_and_refusals_name_a_worker() -> None:
    blaming = {cause for cause in Cause if Verdict(cause).blames_worker}
    assert blaming == {Cause.FAULT, Cause.LOSS, Cause.REFUSAL}


def test_non_finite_logits_are_caused_by_the_request() -> None:
    verdict = VERDICTS[error_pb2.ERROR_CODE_NOT_FINITE]
    assert (verdict.cause, verdict.blames_worker) == (Cause.REQUEST, False)
    assert error_reason(error_pb2.ERROR_CODE_NOT_FINITE) == "not_finite"
