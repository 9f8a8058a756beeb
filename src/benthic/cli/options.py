"""The option table as command-line parameters: every command that starts an engine gets the same flags.

The one thing to know: a decorated command receives one `Options` object. Flags win over `--config FILE`, and what
neither names stays None.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from benthic.config import OPTIONS, Option, Options, read_config_file
from benthic.config.options import merge

F = TypeVar("F", bound=Callable[..., Any])

_MODEL_HELP = (
    "Built-in name (smollm2-135m, benthic-tiny), GGUF file, checkpoint folder or Hugging Face hub id. "
    "Default: smollm2-135m."
)
_CONFIG_HELP = "TOML or JSON file with options by name; flags win over it. E.g. --config benthic.toml"


def with_options(server: bool) -> Callable[[F], Callable[..., Any]]:
    """Add MODEL, `--config` and the option table to a command, which gets them as one argument, `options: Options`.

    `server`: also the options that only a server has (a config file may name them either way, so that one file does
    for all commands). The wrapped command raises ConfigError for a config file that can't be used.
    """
    chosen = [option for option in OPTIONS if server or not option.server_only]

    def decorate(command: F) -> Callable[..., Any]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(name, parameter.annotation))
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "options"
        ]
        parameters = [_keyword("model", Annotated[str | None, typer.Argument(help=_MODEL_HELP)]), *own]
        parameters.append(_keyword("config", Annotated[Path | None, typer.Option("--config", help=_CONFIG_HELP)]))
        parameters += [_keyword(option.name, _annotation(option)) for option in chosen]

        def wrapper(**values: Any) -> Any:
            given = Options(model=values.pop("model"), **{option.name: values.pop(option.name) for option in chosen})
            config = values.pop("config")
            return command(options=given if config is None else merge(given, read_config_file(config)), **values)

        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__module__, wrapper.__qualname__ = command.__module__, command.__qualname__
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return wrapper

    return decorate


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _annotation(option: Option) -> Any:
    text = f"{option.help} E.g. {option.usage}"
    # a flag that says no wins over a config file's yes
    names = f"{option.flag}/--no-{option.flag[2:]}" if option.kind is bool else option.flag
    return Annotated[option.kind | None, typer.Option(names, help=text, rich_help_panel=option.group)]
