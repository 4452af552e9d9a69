"""Data types shared by all rooms: requests, sequences, limits and step plans. No tensor code."""
