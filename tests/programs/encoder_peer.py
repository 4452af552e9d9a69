"""Peer of `encoder_equality` and `encoder_serving`: sentence-transformers in its own environment.

It reads a JSON object from standard input: the folder of a model, its task, its texts (pairs of
texts for a cross encoder), the device, the dtype, the size of batches, how many texts each call has
(all of them if it is 0), and how often all are computed. It writes the results to the file ``out``
as fp32, and prints the seconds and the CPU seconds of the fastest pass over all texts.
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
    kwargs = {"device": given["device"], "model_kwargs": {"dtype": given["dtype"]}}
    if given["task"] == "embed":
        model = SentenceTransformer(given["folder"], **kwargs)
        compute = model.encode
    else:
        model = CrossEncoder(given["folder"], **kwargs)
        compute = model.predict
    model.max_seq_length = given["max_tokens"]
    texts = given["texts"]
    size = given["call_texts"] or len(texts)
    best = {"seconds": float("inf"), "cpu_seconds": float("inf")}
    for _ in range(given["repeats"]):
        start, cpu_start = time.perf_counter(), time.process_time()
        found = [
            compute(
                texts[at : at + size],
                batch_size=given["batch"],
                convert_to_tensor=True,
                show_progress_bar=False,
            ).cpu()
            for at in range(0, len(texts), size)
        ]
        best["seconds"] = min(best["seconds"], time.perf_counter() - start)
        best["cpu_seconds"] = min(best["cpu_seconds"], time.process_time() - cpu_start)
    save_file({"results": torch.cat(found).float().contiguous()}, given["out"])
    print(json.dumps(best))  # noqa: T201


if __name__ == "__main__":
    main()
