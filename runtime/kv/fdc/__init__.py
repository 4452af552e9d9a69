"""KV format `fdc`: K (after RoPE) and V projected to fewer dimensions, bf16."""

from runtime.kv.fdc.calibrate import FdcOptions, calibrate
from runtime.kv.fdc.format import FdcFormat

__all__ = ["FdcFormat", "FdcOptions", "calibrate"]
