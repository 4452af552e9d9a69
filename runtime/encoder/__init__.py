"""Encoders: models that compute one vector, or the scores of labels, for each input."""

from runtime.encoder.batch import EncoderInput
from runtime.encoder.model import Activation, Encoder, EncoderTask, load_encoder

__all__ = ["Activation", "Encoder", "EncoderInput", "EncoderTask", "load_encoder"]
