"""Prompts in, lines out."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benthic.cli import generate
from benthic.cli.generate import Prompt, collect_prompts, lines, read_prompts, render
from benthic.common.errors import ConfigError
from benthic.config.resolve import DEFAULT_MODEL


@dataclass
class Answer:
    """An answer as the engine gives it."""

    text: str
    token_ids: list[int] = field(default_factory=lambda: [1, 2])
    finish_reason: str = "stop"
    prompt_tokens: int = 5
    cached_tokens: int = 4


def test_prompts_of_flags_come_before_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second \r\n", encoding="utf-8")
    assert collect_prompts(["flag"], file, False) == [Prompt("flag"), Prompt("first"), Prompt("  second ")]


def test_jsonl_holds_prompts_and_messages(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028there"}]
    rows = [{"prompt": "plain", "id": 3}, {"messages": turns}]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert read_prompts(file) == [Prompt("plain"), Prompt(messages=tuple(turns))]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ("[1]", "object"),
        ('{"prompt": 3}', "prompt"),
        ("{}", "needs one of"),
        ('{"messages": []}', "needs one of"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "needs one of"),
        ('{"messages": [{"role": "user"}]}', "`content`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_prompts(file)
    assert reason in str(caught.value)


def test_chat_wraps_texts_and_leaves_messages(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "b"}]}')
    wrapped = collect_prompts(["a"], file, True)
    assert [p.messages[0]["content"] for p in wrapped] == ["a", "b"]
    assert all(p.text is None for p in wrapped)


def test_plain_prompts_need_no_tokenizer() -> None:
    assert render([Prompt("a"), Prompt("")], "no/such-model") == ["a", ""]


def test_the_chat_template_of_the_built_in_model_is_applied() -> None:
    chatted, plain = render([Prompt(messages=({"role": "user", "content": "Hi"},)), Prompt("Hi")], DEFAULT_MODEL)
    assert len(plain) < len(chatted)
    assert set(plain) <= set(chatted)
    assert chatted[0] == 1  # <|im_start|>, once
    assert chatted[1] != 1


def test_one_answer_is_printed_as_it_is() -> None:
    assert list(lines([Prompt("a")], [Answer("x\ny")], False)) == ["x\ny"]


def test_several_answers_get_headings() -> None:
    prompts = [Prompt("a"), Prompt(messages=({"role": "user", "content": "b"},))]
    assert list(lines(prompts, [Answer("x"), Answer("y")], False)) == ["[1] a", "x", "\n[2] b", "y"]


def test_json_lines_carry_everything() -> None:
    first, second = (json.loads(line) for line in lines([Prompt("a"), Prompt("b")], [Answer("x"), Answer("\n")], True))
    assert first == {
        "index": 0,
        "prompt": "a",
        "text": "x",
        "token_ids": [1, 2],
        "finish_reason": "stop",
        "prompt_tokens": 5,
        "cached_tokens": 4,
    }
    assert (second["index"], second["text"]) == (1, "\n")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature"),
        (["--input", "no-such-file"], "--input"),
        (["--prompt", "a", "--cp", "2"], "use `benthic serve MODEL --cp 2`"),
        (["--prompt", "a", "--tp", "2", "--ep"], "use `benthic serve MODEL --tp 2`"),
    ],
)
def test_mistakes_are_refused_before_a_model_is_loaded(flags: list[str], named: str) -> None:
    app = typer.Typer()
    generate.register(app)
    result = CliRunner().invoke(app, ["no/such-model", *flags])
    assert isinstance(result.exception, ConfigError)
    assert named in str(result.exception)
    assert result.stdout == ""
