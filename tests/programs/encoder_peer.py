"""Peer of `encoder_equality`: sentence-transformers, in an environment of its own.

It reads a JSON object from standard input: the folder of a model, its task, its texts (pairs of
texts for a cross encoder), the dtype, the size of batches, and how often they are timed. It writes
the results to the file ``out`` as fp32, and prints the CPU seconds of the fastest pass over all
texts.
"""

import json
import sys
import time
from typing import Any

import torch
from safetensors.torch import save_file
from sentence_transformers import (  # type: ignore[import-not-found]
    CrossEncoder,
    SentenceTransformer,
)


def main() -> None:
    torch.set_num_threads(1)
    given: dict[str, Any] = json.load(sys.stdin)
    kwargs = {"device": "cpu", "model_kwargs": {"dtype": given["dtype"]}}
    if given["task"] == "embed":
        model = SentenceTransformer(given["folder"], **kwargs)
        compute = model.encode
    else:
        model = CrossEncoder(given["folder"], **kwargs)
        compute = model.predict
    model.max_seq_length = given["max_tokens"]
    seconds = []
    for _ in range(given["repeats"]):
        start = time.process_time()
        found = compute(
            given["texts"],
            batch_size=given["batch"],
            convert_to_tensor=True,
            show_progress_bar=False,
        )
        seconds.append(time.process_time() - start)
    save_file({"results": found.float().contiguous()}, given["out"])
    print(json.dumps(min(seconds)))  # noqa: T201


if __name__ == "__main__":
    main()
