"""Token ids against those that llama.cpp gave for the same vocabulary (tests/data/tokenizer/llama_cpp.json)."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benthic.common.errors import ModelError
from benthic.weights.locate import BUILT_IN, TINY, Source, locate
from benthic.weights.tokenizer import load_tokenizer
from tests.support.gguf_files import write_vocabulary

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "tokenizer" / "llama_cpp.json").read_text())


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    folder = tmp_path_factory.mktemp("vocabularies")
    others = [pre for pre in EXPECTED["ids"] if pre != "smollm"]
    sources = {pre: Source("gguf", write_vocabulary(folder / f"{pre}.gguf", pre), pre) for pre in others}
    return sources | {"smollm": locate(BUILT_IN)}


@pytest.mark.parametrize("pre", list(EXPECTED["ids"]))
def test_ids_equal_those_of_llama_cpp(vocabularies: dict[str, Source], pre: str) -> None:
    tokenizer = load_tokenizer(vocabularies[pre])
    wanted = [(text, ids) for text, ids in zip(EXPECTED["texts"], EXPECTED["ids"][pre], strict=True) if ids is not None]
    assert len(wanted) >= 60
    assert [(text, tokenizer(text)["input_ids"]) for text, _ in wanted] == wanted


def test_whitespace_before_digits_stays_together() -> None:
    tokenizer = load_tokenizer(locate(BUILT_IN))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("foo\n\n1")) == ["foo", "ĊĊ", "1"]


def test_decoding_gives_the_text_back() -> None:
    tokenizer = load_tokenizer(locate(BUILT_IN))
    for text in EXPECTED["texts"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_and_chat_template_of_the_built_in_model() -> None:
    tokenizer = load_tokenizer(locate(BUILT_IN))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True).endswith("user\nhi\nassistant\n")


def test_the_tiny_model_tokenises_its_own_prompts() -> None:
    source = locate(TINY)
    tokenizer = load_tokenizer(source)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (None, 0, 0)
    lines = (source.path / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    for entry in map(json.loads, lines[::10]):
        text = tokenizer.apply_chat_template(entry["messages"], tokenize=False, add_generation_prompt=True)
        assert text == f"[gMASK]<sop><|user|>{entry['messages'][0]['content']}<|assistant|>"
        ids = tokenizer.encode(text)  # nothing is added in front: the template begins with what it needs
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert (len(ids), ids[:3], ids[-1]) == (entry["prompt_tokens"], [2, 4, 7], 8)
        assert tokenizer.decode(ids, skip_special_tokens=True) == entry["messages"][0]["content"]


def test_a_folder_gives_the_same_ids_and_template(tmp_path: Path) -> None:
    built_in = load_tokenizer(locate(BUILT_IN))
    built_in.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    folder = load_tokenizer(locate(str(tmp_path)))
    assert folder.chat_template == built_in.chat_template
    assert folder.eos_token_id == built_in.eos_token_id
    for text in EXPECTED["texts"]:
        assert folder.encode(text) == built_in.encode(text)


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", "tekken")
    with pytest.raises(ModelError, match=r"pre-tokenizer 'tekken'.*supported: gpt-2, smollm, llama-bpe, qwen2"):
        load_tokenizer(Source("gguf", path, "x"))
    with pytest.raises(ModelError, match="pre-tokenizer None"):
        load_tokenizer(Source("gguf", write_vocabulary(tmp_path / "w.gguf", None), "x"))


def test_damaged_vocabularies_are_refused(tmp_path: Path) -> None:
    for name, changes, message in (
        ("kind", {"model": "llama"}, "tokenizer of kind 'llama'"),
        ("types", {"types": [1, 1]}, "49152 tokens but 2 token types"),
        ("bos", {"bos": 99999}, "bos_token_id is 99999, expected a token id below 49152"),
        ("tokens", {"tokens": ["a", "b"], "types": [1, 1], "bos": 0}, "expected a token id below 2"),
    ):
        path = write_vocabulary(tmp_path / f"{name}.gguf", "smollm", **changes)
        with pytest.raises(ModelError, match=message):
            load_tokenizer(Source("gguf", path, "x"))


def test_a_folder_without_or_with_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    source = Source("folder", tmp_path, "x")
    with pytest.raises(ModelError, match=r"no tokenizer: expected tokenizer\.json"):
        load_tokenizer(source)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ModelError, match="its tokenizer can't be loaded"):
        load_tokenizer(source)


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", "smollm", add_bos=True)
    assert load_tokenizer(Source("gguf", path, "x")).encode("foo")[0] == 1


def test_nothing_here_loads_torch(tmp_path: Path) -> None:
    load_tokenizer(locate(BUILT_IN)).save_pretrained(tmp_path)
    shutil.copy(Path(__file__).parents[1] / "data" / "oracles" / "llama" / "config.json", tmp_path)
    program = (
        "import sys\n"
        "from benthic.weights.locate import locate\n"
        "from benthic.weights.model_config import read_generation_defaults\n"
        "from benthic.weights.tokenizer import load_tokenizer\n"
        "for name in sys.argv[1:]:\n"
        "    source = locate(name)\n"
        "    read_generation_defaults(source)\n"
        "    messages = [{'role': 'user', 'content': 'hi'}]\n"
        "    load_tokenizer(source).apply_chat_template(messages, add_generation_prompt=True)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, BUILT_IN, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
