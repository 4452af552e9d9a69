"""Open-loop load generator: sends requests on a fixed schedule and measures the answers."""
