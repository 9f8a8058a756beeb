"""Values in messages to people."""


def clip(value: object, limit: int = 60) -> str:
    """`value` as shown in a message: at most `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= limit else text[: limit - 1] + "…"
