"""Flags of a command from the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

import typer

Function = TypeVar("Function", bound=Callable[..., None])


def takes_flags_of(options: type[Any]) -> Callable[[Function], Function]:
    """Gives a command, in the place of its `**flags`, those of a dataclass (tracekern/launcher/workload.py).

    They stand before the command's own keyword-only parameters.
    """
    hints = get_type_hints(options)

    def flag_of(field: dataclasses.Field[Any]) -> inspect.Parameter:
        about = dict(field.metadata)
        kind = about.pop("kind", hints[field.name])
        default = str(field.default) if kind is str else field.default
        option = typer.Option(default, *about.pop("names"), **about)
        return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)

    def decorate(command: Function) -> Function:
        signature = inspect.signature(command, eval_str=True)
        *own, _ = signature.parameters.values()
        flags = [flag_of(field) for field in dataclasses.fields(options) if field.metadata]
        first = [parameter for parameter in own if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
        command.__signature__ = signature.replace(parameters=[*first, *flags, *own[len(first) :]])  # type: ignore[attr-defined]
        return command

    return decorate
