"""The runtime: checkpoints, factorized layers, paged KV, attention, sampling, the engine."""
