"""The course of a generation request, the same for completions and chat: a place in the queue, the prompt, the
engine, the answer."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from benthic.server.context import ServerContext
from benthic.server.generation import Generation
from benthic.server.openai.answer import AnswerShape, EventStream, answer_whole, unless_gone
from benthic.server.openai.sampling import Limits, Wanted, check_hidden_size, room_for
from benthic.server.tokenize import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked request, all but its prompts."""

    wanted: Wanted
    num_prompts: int
    prepare: Callable[[], Awaitable[Sequence[Prompt]]]
    shape: Callable[[Sequence[Prompt]], AnswerShape]
    stream: bool
    chat: bool
    max_tokens_name: str
    prompt_name: str
    generated: bool = True  # False: an echo that generates nothing


async def run_plan(context: ServerContext, request: Request, plan: Plan, limits: Limits) -> Response:
    """The answer. Raises RequestError with the status that fits."""
    places = plan.num_prompts * plan.wanted.n
    context.client.reserve(places, limits.max_requests)
    try:
        prompts = await plan.prepare()
        rooms = [room_for(p.num_tokens, plan.wanted, limits, plan.max_tokens_name, plan.prompt_name) for p in prompts]
        check_hidden_size(plan.wanted, max(rooms), plan.num_prompts, limits)
        context.engine()  # the state may have changed while the prompt was prepared
    except BaseException:
        context.client.release(places)
        raise
    wanted = plan.wanted
    generation = Generation(
        context.client,
        context.tokenizing.model.token_bytes,
        context.metrics,
        limits.hidden_size,
        generated=plan.generated,
    )
    # a client's seed holds for each of its prompts; where it gives none, equal prompts must not get equal noise
    seeds = [context.seeds.draw() if wanted.seed is None else wanted.seed for _ in prompts]
    generation.submit(prompts, wanted, rooms, seeds, chat=plan.chat)
    handed_over = False
    try:
        shape = plan.shape(prompts)
        if not plan.stream:
            return await answer_whole(request, generation, shape)
        if not await unless_gone(request.receive, generation.started()):
            return Response(status_code=499)
        handed_over = True
        return EventStream(generation, shape)
    finally:
        if not handed_over:
            generation.close()
