"""One deployment for all tests of clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.model_source import resolve_model
from tests.harness.deployment import Running, deployed
from tests.harness.encoders import ENCODER


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    with deployed("--encoder", ENCODER) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the model's tokenizer, which transformers reads."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    model = resolve_model("smollm2-135m")
    AutoTokenizer.from_pretrained(str(model.parent), gguf_file=model.name).save_pretrained(folder)
    return folder
