"""Options of a command line, each declared once: a field of a dataclass with its help text, unit, parser and default.

Knows: how a field becomes a flag, the form of a help text. Does not know: which options there are (each command's
options.py, engine_options.py), what is done with them.

    @dataclass(frozen=True, kw_only=True)
    class ServeOptions:
        port: int = option("port to listen on; 0 takes a free one", "port", bounded(integer, 0, 65535), 8000)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from launch.values import integer


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``unit``: of its value; a "switch" has none. ``read``: makes the value of its text, and raises
    ArgumentTypeError. ``shown``: the default in --help, if not the value itself. ``flag``: if not the field's name,
    ``aliases``: further ones. ``more``: for argparse."""

    help: str
    unit: str
    read: Callable[[str], Any] = integer
    shown: str = ""
    flag: str = ""
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def one_of(text: str, choices: tuple[str, ...], shown: str = "") -> Option:
    """An option whose value is one of some words."""
    return Option(text, "word", str, shown, choices=choices)


def option(
    text: str,
    unit: str,
    read: Callable[[str], Any] = integer,
    default: Any = MISSING,
    shown: str = "",
    *,
    flag: str = "",
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    **more: Any,
) -> Any:
    """A dataclass field that is an option (see Option); without ``default`` it is required."""
    return field(default=default, metadata={"option": Option(text, unit, read, shown, flag, aliases, choices, more)})


def choice(text: str, choices: tuple[str, ...], default: str | None, shown: str = "") -> Any:
    """A dataclass field that is such an option."""
    return option(text, "word", str, default, shown, choices=choices)


def switch(text: str, default: bool = False, shown: str = "") -> Any:
    """A dataclass field that is an option without a value: ``--name``, and ``--no-name`` if it is on by default."""
    return option(text, "switch", default=default, shown=shown)


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    owner: type[Any],
    **which: Container[str],
) -> argparse.ArgumentParser:
    """The parser of a command or subcommand, with the options of ``owner``. ``which``: see add_options."""
    parser = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
    add_options(parser, owner, **which)
    return parser


def add_options(
    parser: argparse._ActionsContainer,
    owner: type[Any],
    *,
    only: Container[str] | None = None,
    positional: Container[str] = (),
) -> None:
    """A flag for each field of ``owner`` that is an option (``only``: for those). argparse has no defaults: what was
    not given keeps that of ``owner``. ``positional``: fields that are arguments without a flag."""
    for one in sorted(fields(owner), key=lambda one: one.name not in owner.__annotations__):  # its own ones first
        declared = one.metadata.get("option")
        if declared is not None and (only is None or one.name in only):
            flag = declared.flag or f"--{one.name.replace('_', '-')}"
            add_option(parser, "" if one.name in positional else flag, one.name, declared, one.default)


def add_option(
    parser: argparse._ActionsContainer, flag: str, dest: str, declared: Option, default: Any = MISSING
) -> None:
    """``flag``: empty of an argument without one. ``default``: MISSING of a required option."""
    required = default is MISSING or not flag
    said = "required" if required else f"default: {declared.shown or shown_default(default)}"
    more: dict[str, Any] = {"help": f"{declared.help} ({said}) [{declared.unit}]"}
    if flag:
        more |= {"dest": dest, "default": argparse.SUPPRESS}
    if declared.unit == "switch":
        more["action"] = argparse.BooleanOptionalAction if default is True else "store_true"
    else:
        metavar = None if declared.choices else declared.unit.upper() if flag else dest.upper()
        more |= {"type": declared.read, "choices": declared.choices, "metavar": metavar}
        more |= {"required": required} if flag else {}
    parser.add_argument(*((flag, *declared.aliases) if flag else (dest,)), **{**more, **declared.more})


def shown_default(default: object) -> str:
    """As --help has it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None:
        return "none"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
