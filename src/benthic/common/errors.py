"""The exceptions that reach a user. Each message says what was wrong, with the numbers, and what to do about it."""


class BenthicError(Exception):
    """Base of every error that is the user's or the machine's and not a bug.

    The command line prints it as one paragraph.
    """


class ConfigError(BenthicError):
    """A flag, file or environment setting that can't be used."""


class CapacityError(BenthicError):
    """Not enough memory, pages or disk for what was asked."""


class ModelError(BenthicError):
    """A checkpoint that is missing, damaged, or of an architecture that is not supported."""


class RequestError(BenthicError):
    """A request that can't be served as asked: becomes an OpenAI-shaped error with `status` and the field's name."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class EngineDead(BenthicError):
    """The engine process has ended or has stopped answering."""


class PeerLost(BenthicError):
    """An exchange with the other ranks broke off or took too long: one of them has ended or hangs."""
