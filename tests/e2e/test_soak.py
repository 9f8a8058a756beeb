"""The tests that take long: memory over many requests (case G7), thousands of connections (case C4)."""

import asyncio
import random
import time

import httpx
import psutil
import pytest

from tests.e2e.conftest import FLAGS
from tests.support.server_process import ServerProcess

MODEL = "smollm2-135m"
SMALL = (*FLAGS[: FLAGS.index("--page-size")], "--page-size", "4", "--l1-pages", "512", "--max-running", "32",
         "--chunk-tokens", "256", "--max-context", "128")  # fmt: skip


def measure(server: ServerProcess) -> list[dict[str, int]]:
    """Anonymous and swapped memory, file handles and threads of each process."""
    found = []
    for process in server.family():
        memory = process.memory_full_info()
        found.append(
            {"bytes": memory.uss + memory.swap, "handles": process.num_fds(), "threads": process.num_threads()}
        )
    return found


async def send(server: ServerProcess, start: int, count: int) -> None:
    """`count` unique prompts with one token each; 4 % of the clients go away."""
    dice = random.Random(start)
    queue = iter(range(start, start + count))

    async def worker(client: httpx.AsyncClient) -> None:
        for number in queue:
            # five tokens: a whole page of its own for each request, so that the tree takes and evicts one each time
            prompt = [1000 + number % 40_000, 1000 + number // 40_000, 5, 6, 7]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            if dice.random() < 0.04:
                try:
                    post = client.post("/v1/completions", json=body | {"max_tokens": 60, "ignore_eos": True})
                    await asyncio.wait_for(post, 0.05)
                except TimeoutError:
                    continue
            else:
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        await asyncio.gather(*(worker(client) for _ in range(24)))


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("total", [50_000])
def test_memory_does_not_grow_with_the_number_of_requests(total: int):
    """Case G7: no slope above 100 bytes a request after the first fifth; handles and threads constant."""
    server = ServerProcess(*SMALL)
    try:
        server.wait_ready()
        marks = []
        done = 0
        for share in (0.2, 0.6, 1.0):
            count = int(total * share) - done
            asyncio.run(send(server, done, count))
            done += count
            server.wait_quiet()
            time.sleep(12)  # an idle engine gives back what malloc holds free
            marks.append(measure(server))
        for first, last in zip(marks[0], marks[-1], strict=True):
            slope = (last["bytes"] - first["bytes"]) / (total * 0.8)
            assert slope < 100, (slope, marks)
            assert abs(last["handles"] - first["handles"]) <= 2, marks
            assert last["threads"] == first["threads"], marks
        assert server.stop() == 0
    finally:
        server.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_thousand_connections():
    """Case C4: 200 or 429, never a hang or another error, and a normal request afterwards."""
    soft, hard = psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"needs 12,000 file handles, the limit is {hard}")
    psutil.Process().rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
    server = ServerProcess(*SMALL, "--max-queue", "500")
    try:
        server.wait_ready()

        async def everyone() -> list[int]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
                body = {"model": MODEL, "prompt": "one of many", "max_tokens": 2}
                return [r.status_code for r in await asyncio.gather(
                    *(client.post("/v1/completions", json=body) for _ in range(5000)))]  # fmt: skip

        codes = asyncio.run(everyone())
        assert set(codes) <= {200, 429}
        assert codes.count(200) >= 532
        server.wait_quiet()
        assert server.complete("afterwards")["choices"][0]["text"]
        assert server.stop() == 0
    finally:
        psutil.Process().rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
        server.kill()
