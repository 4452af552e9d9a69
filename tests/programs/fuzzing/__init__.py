"""Mutated and forged messages on every port of the services: nothing crashes, leaks or changes."""
