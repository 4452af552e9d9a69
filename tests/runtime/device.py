"""Device of kernel tests, and random tensors on it."""

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""A GPU where there is one; else the CPU, for Triton's interpreter."""


def random(*shape: int, seed: int = 4) -> torch.Tensor:
    """Normal fp32 values on `DEVICE`, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
