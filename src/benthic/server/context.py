"""What the endpoints share: the model's text side, the client, the limits, and whether requests are taken now."""

from dataclasses import dataclass, field

from benthic.common.errors import RequestError
from benthic.messages import CacheState, Ready
from benthic.observability.metrics import Metrics
from benthic.observability.rank_disks import RankDisks
from benthic.server.engine_client import EngineClient
from benthic.server.generation import Seeds
from benthic.server.openai.sampling import Limits
from benthic.server.tokenize import PromptRules, Tokenizing
from benthic.weights.model_config import GenerationDefaults


@dataclass(slots=True)
class ServerState:
    """Where the server stands. Owned by the lifecycle; the endpoints read it."""

    ready: Ready | None = None
    draining: bool = False
    unhealthy: str | None = None  # why, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSide:
    """What the server process itself knows of the model, once its tokenizer is loaded."""

    tokenizing: Tokenizing
    defaults: GenerationDefaults


@dataclass(slots=True, kw_only=True)
class ServerContext:
    """Handed to every endpoint."""

    model_name: str
    created: int  # Unix seconds
    api_key: str | None
    max_queue: int
    client: EngineClient
    metrics: Metrics
    seeds: Seeds
    rank_disks: RankDisks = field(default_factory=RankDisks)  # of the ranks that answer no QueryState
    state: ServerState = field(default_factory=ServerState)
    text: TextSide | None = None  # set before `state.ready`
    last_cache: tuple[float, CacheState] | None = None  # monotonic seconds, state

    def engine(self) -> Ready:
        """What the engine can take. Raises RequestError 503 while it can't take anything."""
        state = self.state
        if state.unhealthy is not None:
            raise RequestError(f"the server is unhealthy: {state.unhealthy}", status=503, code="unhealthy")
        if state.draining:
            raise RequestError(
                "the server is shutting down and takes no new requests", status=503, code="shutting_down"
            )
        if state.ready is None:
            raise RequestError("the model is still loading; ask /ready", status=503, code="loading")
        return state.ready

    @property
    def tokenizing(self) -> Tokenizing:
        """The tokenizer's threads; only after `engine` has not raised."""
        assert self.text is not None
        return self.text.tokenizing

    @property
    def defaults(self) -> GenerationDefaults:
        """The model's sampling defaults; only after `engine` has not raised."""
        assert self.text is not None
        return self.text.defaults

    def limits(self) -> Limits:
        """What a request may ask for. Raises RequestError 503."""
        ready = self.engine()
        return Limits(
            max_request_tokens=ready.max_request_tokens,
            limit_reason=ready.limit_reason,
            vocab_size=ready.vocab_size,
            hidden_size=ready.hidden_size,
            max_requests=ready.max_running + self.max_queue,
        )

    def prompt_rules(self) -> PromptRules:
        """What prompts are checked against. Raises RequestError 503."""
        ready = self.engine()
        return PromptRules(
            namespace=ready.namespace,
            page_size=ready.page_size,
            max_request_tokens=ready.max_request_tokens,
            limit_reason=ready.limit_reason,
            vocab_size=ready.vocab_size,
        )

    def check_model(self, name: str | None) -> None:
        """Raises RequestError 404 for a model that is not served here."""
        if name is not None and name != self.model_name:
            raise RequestError(
                f"the model {name[:80]!r} is not served here; this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )
