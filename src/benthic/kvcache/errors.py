"""The one exception of the cache core: its state, or a call on it, contradicts itself."""


class InvariantError(RuntimeError):
    """A bug: replicated state is corrupt or would become so. The server stops; nobody catches this to go on."""
