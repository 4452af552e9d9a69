import pytest

import codec
from codec.ops import Backend
from tests.codec.samples import BACKENDS, BOOK


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture(scope="session")
def codebook() -> codec.Codebook:
    """Sixteen codes for the exponents of values near one."""
    return BOOK
