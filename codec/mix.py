"""SplitMix64's finalizer, used by the checksum keys and the header seal. Pure Python."""

MASK64 = (1 << 64) - 1
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """Apply the finalizer of SplitMix64, a bijection of 64-bit integers."""
    value = (value ^ (value >> 30)) * MIX_1 & MASK64
    value = (value ^ (value >> 27)) * MIX_2 & MASK64
    return value ^ (value >> 31)
