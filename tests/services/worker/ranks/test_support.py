"""Refusals of settings for several ranks, before any process starts."""

from typing import Any

import pytest
import torch

from services.common.errors import SettingsError
from services.worker.ranks.support import check_ranks
from services.worker.settings import WorkerSettings


def settings_of(**values: Any) -> WorkerSettings:
    return WorkerSettings.model_validate({"codec": "raw", "device": "cpu", **values})


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_ranks(settings_of(device="auto", tp=2))
    with pytest.raises(SettingsError, match="tp is 3, but this process sees 2 GPUs"):
        check_ranks(settings_of(device="auto", tp=3))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("shard", "its basis of K spans all KV heads"),
        ("palu", "its bases of K span groups of KV heads"),
        ("fdc", "its calibration is not divided by KV head"),
        ("kvquant", "its calibration is not divided by KV head"),
    ],
)
def test_calibrated_formats_are_refused_with_the_reason(name: str, reason: str) -> None:
    check_ranks(settings_of(kv_format=f"{name}:calibration"))
    with pytest.raises(SettingsError, match=f"{name} does not support several ranks .*{reason}"):
        check_ranks(settings_of(kv_format=f"{name}:calibration", tp=2))


@pytest.mark.parametrize("name", ["dense", "fp8", "int4", "stream4", "k4v2", "a.plug.in:Format"])
def test_other_formats_are_divided_by_kv_head(name: str) -> None:
    check_ranks(settings_of(kv_format=name, tp=64))
