"""benthic-tiny in this process: its tasks, and the same answers whatever the chunk size."""

import pytest
import torch

from benthic.engine.llm import LLM, Completion
from tests.support.tiny_tasks import LONGEST_ANSWER, MODEL, PAGE, Told, assert_card, first_tasks, text_ids, whole_pages

SOME = {("records", 1024): 1, ("facts", 1024): 1, ("copy", 256): 2, ("add", 32): 2}
TOPK = 256


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def answers(llm: LLM, prompts: list[list[int]], max_tokens: int, **fields: object) -> list[Completion]:
    return llm.generate(prompts, max_tokens=max_tokens, temperature=0.0, **fields)


def test_tasks_are_solved_and_no_chunk_size_changes_an_answer():
    """The chunks: one page, 13 pages that divide no prompt, and so many that each prompt is one chunk."""
    tasks = first_tasks(SOME)
    odd = [text_ids(length, number=70 + length) for length in (1, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK)]
    odd.append(text_ids(1, number=5) * (4 * TOPK))  # nothing but ties
    got = []
    for chunk in (PAGE, 13 * PAGE, 128 * PAGE):
        with LLM(MODEL, device="cpu", dtype="float32", page_size=PAGE, chunk_tokens=chunk, max_running=8,
                 l1_pages=1400) as llm:  # fmt: skip
            prompts = [llm.render_chat(task.messages) for task in tasks]
            solved = answers(llm, prompts, LONGEST_ANSWER)
            told = [Told(c.text, c.finish_reason, c.prompt_tokens, c.cached_tokens, 0, 0) for c in solved]
            assert_card(zip(tasks, told, strict=True))
            again = answers(llm, prompts[:2], LONGEST_ANSWER)
            assert [c.cached_tokens for c in again] == [whole_pages(len(p)) for p in prompts[:2]]
            assert [c.text for c in again] == [c.text for c in solved[:2]]
            got.append([c.token_ids for c in (*solved, *answers(llm, odd, 12, ignore_eos=True))])
    assert got[1] == got[0]
    assert got[2] == got[0]
