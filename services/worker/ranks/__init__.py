"""The processes of a worker's ranks: their start, their supervision and their end."""
