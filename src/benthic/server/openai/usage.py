"""The `usage` object."""

from typing import Any

from benthic.server.generation import Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's counts; `cached_tokens_by_tier` is an extension, beside the count that it splits up."""
    by_tier = {"l1": usage.cached_l1, "l2": usage.cached_l2, "l3": usage.cached_l3}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "cached_tokens_by_tier": by_tier},
        "cached_tokens_by_tier": by_tier,  # here too: some clients' types drop what they don't know in the details
    }
