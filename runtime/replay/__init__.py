"""Prefill batches and decode steps that replay CUDA graphs."""
