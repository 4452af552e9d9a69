"""`mix64`, which the checksum and the header's seal are mixed with. Pure Python."""

MASK64 = (1 << 64) - 1
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """The finalizer of SplitMix64, a bijection of 64 bits."""
    value = (value ^ (value >> 30)) * MIX_1 & MASK64
    value = (value ^ (value >> 27)) * MIX_2 & MASK64
    return value ^ (value >> 31)
