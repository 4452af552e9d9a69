"""Offline commands: calibrate, compress, convert, KV statistics, tune."""
