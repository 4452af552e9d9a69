import pytest
import torch

import codec
from codec.backend import Backend
from tests.codec.payloads import encoded
from tests.codec.samples import BACKENDS, BOOK, Pages, make_pages


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture(scope="session")
def codebook() -> codec.Codebook:
    """Codebook of sixteen exponents near that of 1.0."""
    return BOOK


@pytest.fixture
def source() -> Pages:
    return make_pages(17, kind="mixed")


@pytest.fixture
def payload(source: Pages, codebook: codec.Codebook) -> torch.Tensor:
    return encoded(source, [codebook] * 2)
