"""Request fields of OpenAI's, vLLM's and SGLang's APIs that this service does not implement.

Many clients send such fields with values that change nothing. Each field is declared once, with the
values that are accepted and ignored. All other values are refused with an error that names the
field, because the client would get another answer than it asked for. The parser and the OpenAPI
document follow from the declarations. The table in FIELDS.md of the gateway lists them as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True)
class OtherField:
    """A field that is not implemented.

    Attributes:
        values: JSON values that are accepted besides null.
        hint: whether any value is accepted, because no value changes the answer.
        rule: function ``(value, body)`` that returns whether the value is accepted.
        note: description of ``rule``.
    """

    values: tuple[Any, ...] = ()
    hint: bool = False
    rule: Callable[[Any, Mapping[str, Any]], bool] | None = None
    note: str = ""

    def accepts(self, value: Any, body: Mapping[str, Any]) -> bool:
        """Return whether a value in a request body is accepted and ignored."""
        if value is None or self.hint:
            return True
        if self.rule is not None:
            return self.rule(value, body)
        return any(_equal(value, accepted) for accepted in self.values)

    @property
    def accepted(self) -> str:
        """Description of the accepted values, in Markdown."""
        if self.hint:
            return "any value"
        values = ", ".join(f"`{orjson.dumps(value).decode()}`" for value in (None, *self.values))
        return f"{values}, {self.note}" if self.note else values

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the accepted values. ``x-supported`` marks it for the API reference."""
        if self.hint:
            return {"description": "ignored", "x-supported": False}
        described = {
            "description": f"not supported; ignored if {self.accepted}",
            "x-supported": False,
        }
        if self.rule is not None:
            return described
        accepted: list[dict[str, Any]] = [{"const": value} for value in self.values]
        return {"anyOf": [*accepted, {"type": "null"}], **described}


OtherFields = Mapping[str, OtherField]


def _equal(value: Any, accepted: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, true is not 1."""
    if isinstance(accepted, bool) or isinstance(value, bool):
        return value is accepted
    return bool(value == accepted)


def _declare(*groups: tuple[OtherField, Sequence[str]]) -> OtherFields:
    return {name: other for other, names in groups for name in sorted(names)}


def _only(*values: Any) -> OtherField:
    return OtherField(values)


_HINT = OtherField(hint=True)
_BEST_OF_N = OtherField(
    rule=lambda value, body: _equal(value, 1 if body.get("n") is None else body["n"]),
    note="the value of `n`",
)

IN_REQUEST = _declare(
    (
        _HINT,
        (
            *("custom_labels", "metadata", "prediction"),
            *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id"),
            *("return_mm_kwargs", "rid", "safety_identifier", "service_tier", "session_id"),
            *("spaces_between_special_tokens", "stream_interval", "user"),
        ),
    ),
    (
        _only(),
        (
            *("audio", "chat_template", "custom_logit_processor", "ebnf"),
            *("guided_decoding_backend", "guided_whitespace_pattern", "input_ids", "json_schema"),
            *("logprob_token_ids", "lora_path", "moderation", "prompt_embeds"),
            *("reasoning", "regex", "repetition_detection", "session_params"),
            *("task", "thinking", "web_search_options"),
        ),
    ),
    (
        _only(False),
        (
            *("early_stopping", "no_stop_trim"),
            *("return_cached_tokens_details", "return_hidden_states"),
            *("return_meta_info", "return_prompt_text", "return_prompt_token_ids"),
            *("return_routed_experts", "return_token_offsets", "return_tokens_as_token_ids"),
            *("store", "use_audio_in_video", "use_beam_search", "watermarking"),
        ),
    ),
    (
        _only(True),
        ("separate_reasoning", "skip_special_tokens", "stream_reasoning"),
    ),
    (
        _only([]),
        ("documents", "functions", "stop_regex"),
    ),
    (
        _only({}),
        (
            *("custom_params", "images_config"),
            *("media_io_kwargs", "mm_processor_kwargs", "nvext", "vllm_xargs"),
        ),
    ),
    (_only("none", "auto"), ("function_call",)),
    (_only(""), ("suffix",)),
    (_only("medium"), ("verbosity",)),
    (_only(["text"]), ("modalities",)),
    (_only(1), ("length_penalty",)),
    (_only(0), ("routed_experts_prompt_start", "routed_experts_start_len")),
    (_only(-1), ("thinking_token_budget",)),
    (_BEST_OF_N, ("best_of",)),
)
"""Fields of all requests with a prompt or a conversation."""

_OF_OUTPUT = _declare(
    (_HINT, ("parallel_tool_calls",)),
    (_only(True), ("include_reasoning",)),
)
"""Fields that concern the message that a chat returns."""
_ECHO = _declare((_only(False), ("echo",)))

IN_CHAT = {**IN_REQUEST, **_declare((_only(False), ("add_special_tokens",))), **_ECHO}
"""Fields of a chat completion. Completions support those that are not in `IN_REQUEST`."""

IN_COMPLETION = {
    **IN_REQUEST,
    **_OF_OUTPUT,
    **_declare(
        (_only(), ("reasoning_effort",)),
        (_only(False), ("continue_final_message",)),
        (_only(True), ("add_generation_prompt",)),
        (_only([]), ("tools",)),
        (_only({}), ("chat_template_kwargs",)),
        (_only("none", "auto"), ("tool_choice",)),
    ),
}
"""Fields of a completion. Chat completions support those that are not in `IN_REQUEST`."""

IN_TOKENIZE = {**IN_REQUEST, **_OF_OUTPUT, **_ECHO}
"""Fields of a request for token ids."""

_OF_ENCODER = _declare(
    (_HINT, ("metadata", "request_id", "safety_identifier", "service_tier", "user")),
    (_only(True), ("add_special_tokens", "use_activation")),
    (_only({}), ("mm_processor_kwargs",)),
)
"""Fields of all requests for an encoder."""
IN_EMBEDDINGS = {
    **_OF_ENCODER,
    **_declare(
        (_only(), ("chat_template", "input_type", "messages", "task")),
        (_only("float", "float32"), ("embed_dtype",)),
        (_only("native", "little"), ("endianness",)),
    ),
}
IN_RERANK = {
    **_OF_ENCODER,
    **_declare(
        (
            _only(),
            ("instruction", "max_chunks_per_doc", "max_tokens_per_doc"),
        ),
        (_only(False), ("raw_scores", "return_embeddings")),
        (_only(["text"]), ("rank_fields",)),
    ),
}
IN_SCORE = {**_OF_ENCODER, **_declare((_only(), ("data_1", "data_2", "instruction")))}

IN_STREAM_OPTIONS = _declare((_only(False), ("include_obfuscation",)))
IN_STRUCTURED_OUTPUTS = _declare(
    (_HINT, ("disable_fallback",)),
    (_only(), ("structural_tag", "whitespace_pattern")),
    (_only(False), ("disable_additional_properties", "disable_any_whitespace")),
)
IN_MESSAGE = _declare(
    (_HINT, ("id", "metadata", "name", "parsed")),
    (_only(), ("audio", "function_call", "prefix")),
    (_only([]), ("annotations",)),
    (_only(""), ("refusal",)),
)
IN_TOOL_CALL = _declare((_HINT, ("index",)))
IN_CALLED_FUNCTION = _declare((_HINT, ("parsed_arguments",)))
IN_TOOL = _declare((_HINT, ("cache_control",)))
IN_PART = _declare(
    (_HINT, ("cache_control", "prompt_cache_breakpoint")),
    (_only([]), ("annotations",)),
)

_NO_LOGPROBS = OtherField(
    rule=lambda value, _: isinstance(value, list) and "message.output_text.logprobs" not in value,
    note="lists without `message.output_text.logprobs`",
)

IN_RESPONSES = _declare(
    (
        _HINT,
        (
            *("client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options"),
            *("prompt_cache_retention", "safety_identifier", "service_tier", "user"),
        ),
    ),
    (
        _only(),
        (
            *("access_programs", "background_options", "conversation", "image", "moderation"),
            *("previous_response_id", "prompt"),
        ),
    ),
    (_only(False), ("background", "store")),
    (_only([]), ("context_management",)),
    (_only(0), ("top_logprobs",)),
    (_only("disabled"), ("truncation",)),
    (_NO_LOGPROBS, ("include",)),
)
"""Fields of a request of the Responses API. `max_tool_calls` counts hosted tools only."""
IN_RESPONSES_TEXT = _declare((_only("medium"), ("verbosity",)))
IN_RESPONSES_REASONING = _declare(
    (_only("auto"), ("context", "generate_summary", "summary")),
    (_only("standard"), ("mode",)),
)
IN_RESPONSES_ITEM = _declare(
    (_HINT, ("id", "phase", "status")),
    (_only(), ("caller", "namespace")),
    (_only(False), ("async",)),
)
"""Fields of items of the input."""
IN_RESPONSES_CALL_ITEM = {k: v for k, v in IN_RESPONSES_ITEM.items() if k != "namespace"}
IN_RESPONSES_OUTPUT_ITEM = {**IN_RESPONSES_ITEM, **_declare((_HINT, ("name", "namespace")))}
IN_RESPONSES_REASONING_ITEM = {
    **IN_RESPONSES_ITEM,
    **_declare((_HINT, ("summary",)), (_only(""), ("encrypted_content",))),
}
IN_RESPONSES_PART = _declare((_HINT, ("annotations", "logprobs", "prompt_cache_breakpoint")))
IN_RESPONSES_TOOL = _declare(
    (_HINT, ("output_schema",)),
    (_only(False), ("async", "defer_loading")),
    (_only(["direct"]), ("allowed_callers",)),
)

IN_MESSAGES_PROMPT = _declare(
    (
        _HINT,
        (
            *("cache_control", "diagnostics", "metadata", "service_tier", "user_profile_id"),
            "workspace_id",
        ),
    ),
    (_only(), ("container", "inference_geo", "mcp_servers", "output_format")),
    (_only("standard"), ("speed",)),
    (
        _only({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        ("context_management",),
    ),
)
"""Fields of a request of Anthropic's Messages API."""
IN_MESSAGES_BLOCK = _declare(
    (_HINT, ("cache_control", "is_error", "signature")),
    (_only([]), ("citations",)),
    (_only(), ("toolset_name",)),
    (_only({"type": "direct"}), ("caller",)),
)
"""Fields of blocks of contents. A result that is an error says so in its text."""
IN_MESSAGES_TOOL = _declare(
    (_HINT, ("cache_control", "eager_input_streaming", "input_examples")),
    (_only(False), ("defer_loading",)),
    (_only(["direct"]), ("allowed_callers",)),
)
IN_MESSAGES_THINKING = _declare((_HINT, ("budget_tokens",)))
