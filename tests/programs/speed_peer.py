"""Baseline of `tests.programs.speed`: transformers with the same weights, in a separate process."""

import json
import statistics
import time
from typing import Any

import torch

from runtime.checkpoint import load_checkpoint
from runtime.offline.bench import peers
from services.common.model_source import resolve_model

PREFILL_TOKENS, DECODE_PROMPT, DECODE_TOKENS, REPEATS = 512, 128, 48, 3


@torch.inference_mode()
def measure(model: Any) -> dict[str, float]:
    """Return the seconds of a 512-token prefill and the tokens/s of greedy decode, medians of 3."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, PREFILL_TOKENS), generator=generator)
    prefill, decode = [], []
    model(prompt[:, :DECODE_PROMPT])
    for _ in range(REPEATS):
        start = time.perf_counter()
        model(prompt, logits_to_keep=1)
        prefill.append(time.perf_counter() - start)
        forward = peers.cached(model)
        token = forward(prompt[:, :DECODE_PROMPT]).argmax(-1)
        start = time.perf_counter()
        for _ in range(DECODE_TOKENS):
            token = forward(token).argmax(-1)
        decode.append(DECODE_TOKENS / (time.perf_counter() - start))
    return {
        "prefill_s": statistics.median(prefill),
        "decode_tokens_per_s": statistics.median(decode),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    peer = peers.build(load_checkpoint(resolve_model("smollm2-135m")))
    print(json.dumps(measure(peer)))  # noqa: T201
