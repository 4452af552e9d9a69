"""KV format `kvquant`: non-uniform codes with exact outliers, of K and V or of latents."""

from runtime.kv.kvquant.calibrate import (
    LATENT_FORMATS,
    CodeOptions,
    KvQuantOptions,
    calibrate,
    check_quantizable,
    quantize_latents,
    quantized_name,
)
from runtime.kv.kvquant.format import KvQuantFormat, QuantizedPages, quantized_format

__all__ = [
    "LATENT_FORMATS",
    "CodeOptions",
    "KvQuantFormat",
    "KvQuantOptions",
    "QuantizedPages",
    "calibrate",
    "check_quantizable",
    "quantize_latents",
    "quantized_format",
    "quantized_name",
]
