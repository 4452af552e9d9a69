"""Shared data types: requests, sequences, limits and step plans. No tensor code."""
