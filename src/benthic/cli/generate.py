"""`benthic generate`: answers to prompts from the command line or a file, without a server.

Only results go to stdout; progress and log lines go to stderr.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from benthic.cli.offline import Generation, engine_arguments, open_llm
from benthic.cli.options import with_options
from benthic.common.errors import ConfigError

Message: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one answer is asked for: plain text, or messages for the chat template."""

    text: str | None = None
    messages: tuple[Message, ...] = ()


class _Line(msgspec.Struct):
    """One line of a JSONL file; other keys are ignored."""

    prompt: str | None = None
    messages: list[Message] | None = None


def register(app: typer.Typer) -> None:
    """Add `generate` to `app`."""
    app.command()(with_options(server=False)(generate))


def generate(
    options: Any,
    prompt: Annotated[
        list[str] | None, typer.Option(help="May be given several times. E.g. --prompt 'Once upon'")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option("--input", help="One prompt a line; with .jsonl, objects with `prompt` or `messages`."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt into the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Tokens an answer at most. E.g. --max-tokens 256")] = 128,
    temperature: Annotated[float, typer.Option(help="0: greedy. E.g. --temperature 0.7")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of the texts.")] = False,
) -> None:
    """Generate answers to prompts, without a server.

    Example: benthic generate --chat --prompt "What is a benthic zone?" --max-tokens 60
    """
    prompts = collect_prompts(prompt or [], input_file, chat)
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens {max_tokens}: must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"--temperature {temperature:g}: must be 0 or more")
    arguments = engine_arguments(options)
    inputs = render(prompts, arguments["model"])
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "progress": len(inputs) > 1}
    sampling |= {"stop": stop} if stop else {}
    sampling |= {"seed": options.seed} if options.seed is not None else {}
    with open_llm(arguments) as llm:
        answers = llm.generate(inputs, **sampling)
    for line in lines(prompts, answers, as_json):
        typer.echo(line)


def collect_prompts(texts: Sequence[str], file: Path | None, chat: bool) -> list[Prompt]:
    """The prompts in the order given, those of the file last. Raises ConfigError where there is none."""
    found = [Prompt(text) for text in texts]
    if file is not None:
        found += read_prompts(file)
    if not found:
        raise ConfigError("nothing to generate from: give --prompt TEXT or --input FILE")
    if chat:
        found = [p if p.text is None else Prompt(messages=({"role": "user", "content": p.text},)) for p in found]
    return found


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a text file (one a line) or a JSONL file, no empty lines. Raises ConfigError with the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {file}: can't be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if file.suffix == ".jsonl":
        return [_parse_line(line, f"--input {file}, line {number}") for number, line in numbered]
    return [Prompt(line.rstrip("\r")) for _, line in numbered]


def _parse_line(line: str, where: str) -> Prompt:
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from None
    if (parsed.prompt is None) == (not parsed.messages):
        raise ConfigError(f"{where}: needs one of `prompt` (text) and `messages` (a list that is not empty)")
    if any(not {"role", "content"} <= message.keys() for message in parsed.messages or ()):
        raise ConfigError(f"{where}: each message needs `role` and `content`")
    return Prompt(parsed.prompt, tuple(parsed.messages or ()))


def render(prompts: Sequence[Prompt], model: str) -> list[str] | list[list[int]]:
    """What the engine gets: texts, or token ids as soon as one prompt goes through the model's chat template.

    Raises ModelError or RequestError where the model has no such template, or the template refuses.
    """
    if not any(prompt.messages for prompt in prompts):
        return [prompt.text or "" for prompt in prompts]
    from benthic.text.text_model import CheckpointText  # these load transformers
    from benthic.weights.locate import locate
    from benthic.weights.tokenizer import load_tokenizer

    text_model = CheckpointText(load_tokenizer(locate(model)))
    return [
        # a template writes its own start token
        text_model.encode(text_model.render_chat(p.messages, {}), add_special_tokens=False)
        if p.text is None
        else text_model.encode(p.text, add_special_tokens=True)
        for p in prompts
    ]


def lines(prompts: Sequence[Prompt], answers: Sequence[Generation], as_json: bool) -> Iterator[str]:
    """What is printed: one answer as it is; several under a heading each; or one JSON object each."""
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if as_json:
            asked = {"prompt": prompt.text} if prompt.text is not None else {"messages": prompt.messages}
            yield msgspec.json.encode({"index": index, **asked, **_plain(answer)}).decode()
            continue
        if len(prompts) > 1:
            asked_text = prompt.messages[-1]["content"] if prompt.text is None else prompt.text
            yield f"{'' if index == 0 else chr(10)}[{index + 1}] {asked_text}"
        yield answer.text


def _plain(answer: Generation) -> dict[str, Any]:
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
    }
