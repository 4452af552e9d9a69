"""CUDA graph capture and asynchronous copies between host and device."""
