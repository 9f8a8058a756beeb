"""Reads the two fields whose shape is free: `prompt` of a completion and `messages` of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from benthic.common.errors import RequestError
from benthic.common.show import clip

MAX_PROMPTS = 128
_ROLES = ("system", "developer", "user", "assistant")
_IMAGE = "only text parts are supported; this model reads no images, audio or files"


def read_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion: text, token ids, or a list of either. Raises RequestError 400."""
    if prompt is None:
        raise _bad("prompt", "is missing: give text, token ids, or a list of either")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _bad("prompt", "is an empty list: give text, token ids, or a list of either")
    if _is_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise _bad("prompt", f"has {len(prompt)} prompts; at most {MAX_PROMPTS} in one request")
    prompts: list[str | list[int]] = []
    for i, one in enumerate(prompt):
        if isinstance(one, list) and not one:
            raise _bad("prompt", "is an empty list of tokens: give at least one", f"prompt[{i}]")
        if not isinstance(one, str) and not (isinstance(one, list) and _is_ids(one)):
            raise _bad("prompt", "must be text, a list of token ids, or a list of either, not mixed", f"prompt[{i}]")
        prompts.append(one)
    if len({type(one) for one in prompts}) > 1:
        raise _bad("prompt", "mixes text and token ids; send two requests")
    return prompts


def _is_ids(value: Sequence[Any]) -> bool:
    return all(type(token) is int for token in value)


def read_messages(messages: list[Any] | None) -> list[dict[str, str]]:
    """The conversation as role and text. Stops at the first fault, so the error is short. Raises RequestError 400."""
    if not messages:
        raise _bad("messages", "must be a list of at least one message")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: Any, name: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise _bad(name, "must be an object with role and content")
    role = message.get("role")
    if role == "tool" or role == "function":
        raise _bad(f"{name}.role", f"{role!r} is not supported: this server has no tools")
    if role not in _ROLES:
        raise _bad(f"{name}.role", f"must be one of {', '.join(_ROLES)}, not {clip(role)}")
    for field, value in message.items():
        if field not in ("role", "content", "name") and value not in (None, []):
            raise _bad(f"{name}.{clip(field)}", "is not supported; leave it out")
    text = _read_content(message.get("content"), role, f"{name}.content")
    read = {"role": "system" if role == "developer" else str(role), "content": text}
    who = message.get("name")
    if who is not None:
        if not isinstance(who, str):
            raise _bad(f"{name}.name", "must be a string")
        read["name"] = who
    return read


def _read_content(content: Any, role: str, name: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list):
        return "".join(_read_part(part, f"{name}[{i}]") for i, part in enumerate(content))
    raise _bad(name, "must be a string or a list of text parts")


def _read_part(part: Any, name: str) -> str:
    if not isinstance(part, Mapping):
        raise _bad(name, 'must be an object like {"type": "text", "text": "…"}')
    if part.get("type") != "text":
        raise _bad(f"{name}.type", f"{clip(part.get('type'))}: {_IMAGE}")
    if not isinstance(part.get("text"), str):
        raise _bad(f"{name}.text", "must be a string")
    return str(part["text"])


def _bad(field: str, what: str, where: str | None = None) -> RequestError:
    return RequestError(f"{where or field} {what}", param=field)
