"""Embeddings and scores from the outputs of encoder workers."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.encoder_placement import Activation, EncoderModel
from services.common.errors import InvalidRequest

Floats = npt.NDArray[np.float32]


def rows_of(outputs: Sequence[bytes]) -> Floats:
    """Return outputs of workers as float32 `[n, dimension]`."""
    return np.frombuffer(b"".join(outputs), "<f4").reshape(len(outputs), -1)


def shortened(embeddings: Floats, dimensions: int | None) -> Floats:
    """Return the first ``dimensions`` numbers of each embedding, scaled to the length 1.

    Embeddings of models that were trained for it (Matryoshka representation learning, Kusupati et
    al., 2022) lose little by this. None, or all of them: the embeddings are not changed.
    """
    if dimensions is None or dimensions == embeddings.shape[1]:
        return embeddings
    return normalized(embeddings[:, :dimensions])


def similarities(first: Floats, second: Floats) -> list[float]:
    """Return the cosine of each pair of rows."""
    products = normalized(first) * normalized(second)
    return [float(value) for value in products.sum(axis=1, dtype=np.float64)]


def label_scores(outputs: Sequence[bytes], model: EncoderModel) -> list[float]:
    """Return the score of each pair that a cross encoder with one label computed."""
    logits = rows_of(outputs)[:, 0].astype(np.float64)
    if model.activation is Activation.SIGMOID:
        logits = 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
    return [float(value) for value in logits]


def check_dimensions(dimensions: int | None, model: EncoderModel) -> None:
    """Raise `InvalidRequest` if a client asks for more numbers than embeddings have."""
    if dimensions is not None and dimensions > model.dimension:
        raise InvalidRequest(
            f"dimensions must be at most {model.dimension}, the dimension of the embeddings",
            param="dimensions",
        )


def normalized(rows: Floats) -> Floats:
    """Return rows scaled to the length 1."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit: Floats = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
    return unit
