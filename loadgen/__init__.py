"""Load generator: sends requests in an open or a closed loop, and measures the answers."""
