"""Number of prompt tokens to evict from the KV of a sequence.

After the pass that completes a prompt, part of its KV is evicted. The first page (sinks) and the
pages of the window (`runtime.pages.window`) stay. Of the pages between them, each KV head of each
layer keeps the tokens with the largest scores. Whole pages are evicted, so that a token's slot in
its page depends on its position alone: KV index and position differ by a multiple of the page size.

Source: Adnan et al., "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient
Generative Inference", MLSys 2024.
"""

from runtime.pages.window import SINK_PAGES, first_recent

MIN_PROMPT = 128
"""Minimum length in tokens of prompts whose tokens are evicted."""
QUERIES = 32
"""Number of last prompt tokens whose attention determines scores; at most `MIN_PROMPT`."""


def evicted_tokens(prompt_tokens: int, share: float, page_size: int) -> int:
    """Return the number of tokens to evict from each KV head of a prompt, a multiple of a page.

    All workers compute the same number from the prompt's length and the setting.

    Args:
        share: fraction of the prompt tokens to evict; 0 evicts none.
    """
    if not share or prompt_tokens < MIN_PROMPT:
        return 0
    pages = int(share * prompt_tokens) // page_size
    between = first_recent(prompt_tokens, page_size) - SINK_PAGES
    return page_size * min(pages, between)


def vacated_pages(prompt_tokens: int, evicted: int, page_size: int) -> range:
    """Return the pages of a prompt that an eviction leaves without tokens, as indices.

    The tokens that are kept between sinks and window move to the first pages after the sinks. The
    pages without tokens are thus the last pages before the window.

    Args:
        evicted: number of evicted tokens, see `evicted_tokens`.
    """
    window = first_recent(prompt_tokens, page_size)
    return range(window - evicted // page_size, window)
