"""Prompts of a soak: few distinct ones, of which the reference computes each once."""

import json
import random
from pathlib import Path

import httpx

from tests.harness.deployment import Running

DISTINCT = 40
TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome. ",
    "Water boils at a temperature of 100 degrees at sea level. ",
    "Once upon a time there was a miller who had three sons. ",
    "In Python, a list is written with square brackets: [1, 2, 3]. ",
    "The first law of motion says that a body stays at rest unless a force acts on it. ",
    "Tell me a long story about the sea, the ships and the lighthouse. ",
    "She opened the window, looked at the garden, and closed it again. ",
    "To bake bread, mix flour, water, salt and yeast, and wait for an hour. ",
)
INPUT_TOKENS = (3, 3, 16, 16, 40, 40, 64, 130, 300, 1500)
OUTPUT_TOKENS = (1, 2, 20, 100, 300, 1000)


def write_prompts(path: Path, running: Running, *, seed: int, count: int) -> None:
    """Write ``count`` requests for the load generator, as token ids of the deployment's model."""
    rng = random.Random(seed)
    requests = []
    for _ in range(DISTINCT):
        text = "".join(rng.sample(TEXTS, len(TEXTS)) * 12)
        answer = httpx.post(
            f"{running.url}/tokenize",
            json={"model": running.model, "prompt": text},
            timeout=60,
            trust_env=False,
        )
        tokens = answer.raise_for_status().json()["tokens"][: rng.choice(INPUT_TOKENS)]
        requests.append({"prompt": tokens, "max_tokens": rng.choice(OUTPUT_TOKENS)})
    lines = [json.dumps(request) + "\n" for request in requests]
    with path.open("w") as file:
        file.writelines(rng.choice(lines) for _ in range(count))
