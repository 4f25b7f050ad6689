"""Public operators as `torch.compile` sees them: one opaque custom op each, which names the tensors it changes.

Eager calls do not pass through the op: its dispatch costs several times the launch. A compiled caller cannot look into a
launch, so there the call becomes `torch.ops.compact_state.<name>`, whose schema says what is written; dataclass arguments
travel as their tensors, and the output is always given, because an op must not return one of its inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from .checkpoints import Checkpoints
from .draft_log import DraftLog
from .ranges import annotated

F = TypeVar("F", bound=Callable[..., Any])

LIBRARY = torch.library.Library("compact_state", "FRAGMENT")
CLASSES = {"Checkpoints": Checkpoints, "DraftLog": DraftLog}
TYPES = {
    "torch.Tensor": "Tensor",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "Activation": "str?",
    "GateActivation": "str",
    "Backend": "str",
}
OUTPUT_LIKE = ("z", "v", "x")  # the argument, of those an operator has, whose shape and dtype its output takes


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter of an operator and the op's arguments that carry it: one, or one a field of a dataclass `kind`."""

    name: str
    schema: tuple[str, ...]
    kind: Any = None
    fields: tuple[str, ...] = ()


def operator(*changed: str) -> Callable[[F], F]:
    """Decorate a public operator that changes the arguments named (`draft_log.x` is a field), and `out` where it has one."""

    def decorate(function: F) -> F:
        eager = annotated(_positional(function))
        compiled = _define(function, eager, changed)
        return functools.wraps(function)(_dispatcher(function, eager, compiled))  # type: ignore[return-value]

    return decorate


def _positional(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its keyword-only parameters as positional ones: matching a dozen names takes half a microsecond."""
    code = function.__code__
    counts = {"co_argcount": code.co_argcount + code.co_kwonlyargcount, "co_kwonlyargcount": 0}
    return FunctionType(code.replace(**counts), function.__globals__, function.__name__, closure=function.__closure__)


def _dispatcher(
    function: Callable[..., Any], eager: Callable[..., Any], compiled: Callable[..., Any]
) -> Callable[..., Any]:
    """A function of the same parameters that calls `compiled` in a traced caller and `eager` elsewhere, both by position.

    Its source is made from the signature: forwarding `*args, **kwargs` would cost an eager call six times as much.
    """
    signature = inspect.signature(function)
    scope = {"eager": eager, "compiled": compiled, "is_compiling": torch.compiler.is_dynamo_compiling}
    declared, keyword_only = [], False
    for parameter in signature.parameters.values():
        name = parameter.name
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            declared.append("*")
        scope[f"default_{name}"] = parameter.default
        declared.append(name if parameter.default is parameter.empty else f"{name}=default_{name}")
    call = f"({', '.join(signature.parameters)})"
    source = f"def call({', '.join(declared)}):\n return compiled{call} if is_compiling() else eager{call}"
    exec(compile(source, f"<{function.__name__}>", "exec"), scope)
    dispatcher: Callable[..., Any] = scope["call"]
    return dispatcher


def _define(function: Callable[..., Any], eager: Callable[..., Any], changed: tuple[str, ...]) -> Callable[..., Any]:
    """Register the op and return what a compiled caller runs in place of the function."""
    parameters = _parameters(function, (*changed, "out"))
    name, names = function.__name__, [parameter.name for parameter in parameters]
    has_output = "out" in names
    like = next((n for n in OUTPUT_LIKE if n in names), "")
    arguments = ", ".join(argument for parameter in parameters for argument in parameter.schema)
    LIBRARY.define(f"{name}({arguments}) -> ()")

    def run(*flat: Any) -> None:
        eager(**_restore(parameters, flat))

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"compact_state::{name}", lambda *flat: None, lib=LIBRARY)
    op = getattr(torch.ops.compact_state, name).default

    def compiled(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        out = None
        if has_output:
            out = given["out"]
            if out is None:
                out = torch.empty(given[like].shape, dtype=given[like].dtype, device=given[like].device)
            given["out"] = out
        flat: list[Any] = []
        for parameter in parameters:
            value = given[parameter.name]
            if parameter.kind is None:
                flat.append(value)
            else:
                flat.extend([None if value is None else getattr(value, field) for field in parameter.fields])
        op(*flat)
        return out

    return compiled


def _parameters(function: Callable[..., Any], changed: tuple[str, ...]) -> list[Parameter]:
    """The op's schema, parameter by parameter; `Tensor(a!)` marks what it changes, each with a letter of its own."""
    letters = iter("abcdefghijklmnop")

    def tensor(optional: bool, written: bool) -> str:
        return f"Tensor{f'({next(letters)}!)' if written else ''}{'?' if optional else ''}"

    found = []
    for parameter in inspect.signature(function).parameters.values():
        name, text = parameter.name, str(parameter.annotation)
        base, optional = text.removesuffix(" | None"), text.endswith(" | None")
        if base in CLASSES:
            fields = tuple(field.name for field in dataclasses.fields(CLASSES[base]))
            schema = tuple(f"{tensor(True, f'{name}.{field}' in changed)} {name}_{field}" for field in fields)
            found.append(Parameter(name, schema, CLASSES[base], fields))
            continue
        if TYPES[base] == "Tensor":
            kind = tensor(optional and name != "out", name in changed)
        else:
            kind = f"{TYPES[base]}{'?' if optional else ''}"
        found.append(Parameter(name, (f"{kind} {name}",)))
    return found


def _restore(parameters: list[Parameter], flat: tuple[Any, ...]) -> dict[str, Any]:
    """The function's arguments from the op's."""
    values, rest = {}, list(flat)
    for parameter in parameters:
        part, rest = rest[: len(parameter.schema)], rest[len(parameter.schema) :]
        if parameter.kind is None:
            values[parameter.name] = part[0]
        elif any(value is not None for value in part):
            values[parameter.name] = parameter.kind(**dict(zip(parameter.fields, part, strict=True)))
        else:
            values[parameter.name] = None
    return values
