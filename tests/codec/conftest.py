import pytest

import codec
from codec.ops import Backend
from tests.codec.samples import BACKENDS


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return BACKENDS[request.param]


@pytest.fixture(scope="session")
def codebook() -> codec.Codebook:
    """The sixteen exponents of values near one, as N(0, 1) has them."""
    return codec.Codebook(tuple(range(114, 130)))
