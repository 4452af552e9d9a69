"""Deployments with the default encoder, for tests that need its package."""

import importlib.util

import pytest

from services.common.model_source import DEFAULT_ENCODER, ENCODER_PACKAGE

ENCODER = DEFAULT_ENCODER
ALONE = ("--model", "none", "--encoder", ENCODER, "--device", "cpu")
"""Flags of a deployment that serves only the encoder."""
needs_encoder = pytest.mark.skipif(
    importlib.util.find_spec(ENCODER_PACKAGE) is None, reason=f"{ENCODER_PACKAGE} is not installed"
)
