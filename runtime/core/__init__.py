"""The vocabulary of the runtime: requests, sequences, limits and step plans. No tensor code."""
