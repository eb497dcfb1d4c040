"""``stageline plan``: the best ways to run a model on some ranks, before anything runs."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from stageline.errors import ConfigError
from stageline.plans import find_plans

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Any]  # argparse gives its type no public name

NOTHING_FITS = 1
"""The exit status when no way to run the model fits into the memory."""

EPILOG = """\
The function takes no arguments and returns the model and the arguments of one call of it:
(model, example_args), or (model, example_args, example_kwargs). A module of the current directory
is found. Make the model under torch.device("meta") if it is too large for this machine.
Exit status: 0, or 1 if nothing fits into the memory, or 2 for wrong input."""


def add_to(commands: Commands) -> None:
    """Declare the command and its arguments."""
    parser = commands.add_parser(
        "plan",
        help="find cuts, schedule and microbatches for a model",
        description="Find the best ways to run a model: stages, placement, schedule, microbatches, "
        "recompute, and copies of the pipeline if asked for.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="what returns model and example")
    add = parser.add_argument_group("machine").add_argument
    add("--ranks", type=int, required=True, metavar="N", help="how many ranks there are in all")
    add("--memory", metavar="SIZE", help="of each rank: 16GiB (default: that of the device)")
    add("--device", metavar="NAME", help="A100, H100, .. or a TOML file (default: time it here)")
    add = parser.add_argument_group("search").add_argument
    add("--batch-size", type=int, metavar="N", help="rows of a step (default: 8 for each rank)")
    add("--microbatches", type=_counts, metavar="M,..", help="numbers of microbatches to try")
    add("--schedules", type=_names, metavar="NAME,..", help="schedules to try (default: all)")
    add("--data-parallel", type=_degree, default=1, metavar="N", help="copies: a number, or auto")
    add("--metric", default="T", help="what a step takes: T or span (default: T)")
    add = parser.add_argument_group("output").add_argument
    add("--top", type=int, default=5, metavar="K", help="how many proposals (default: 5)")
    add("--json", action="store_true", help="print the proposals as a JSON list")
    add("--save", type=Path, metavar="FILE", help="write the best one, for Proposal.from_json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the proposals for the model that the arguments name."""
    model, args, kwargs = load(arguments.model)
    found = find_plans(
        model,
        args,
        example_kwargs=kwargs,
        ranks=arguments.ranks,
        batch_size=arguments.batch_size or 8 * max(arguments.ranks, 1),
        memory_limit=_size(arguments.memory),
        device=arguments.device,
        data_parallel=arguments.data_parallel,
        schedules=arguments.schedules,
        microbatches=arguments.microbatches,
        metric=arguments.metric,
        top=arguments.top,
    )
    if arguments.json:
        print(json.dumps([json.loads(one.to_json()) for one in found]))
    else:
        print(found)
    if arguments.save and found:
        arguments.save.write_text(found.best.to_json(), encoding="utf-8")
    return 0 if found else NOTHING_FITS


def load(text: str) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any] | None]:
    """Return model, arguments and keyword arguments that a function of a module returns.

    Raises:
        ConfigError: There is no such module or function, or it returns something else.
    """
    what = f"the model {text!r}"
    module_name, colon, function_name = text.partition(":")
    if not (module_name and colon and function_name) or module_name.endswith(".py"):
        raise ConfigError(what, ["wanted MODULE:FUNCTION, such as train:build for train.py"])
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as cause:
        if cause.name is None or not f"{module_name}.".startswith(f"{cause.name}."):
            raise  # the module is there, and imports another that is not
        raise ConfigError(
            what, [f"there is no module {cause.name!r} here: go to its directory, or install it"]
        ) from cause
    function = getattr(module, function_name, None)
    if not callable(function):
        missing = "it has no function" if function is None else "wanted a function, got"
        raise ConfigError(what, [f"{missing} {function_name!r} in {module.__file__}"])
    return _read(what, function())


def _read(what: str, made: Any) -> tuple[nn.Module, tuple[Any, ...], Mapping[str, Any] | None]:
    """Return model and example of what a function returned."""
    wanted = "the function must return (model, example_args) or (model, example_args, kwargs)"
    if not isinstance(made, tuple) or not 2 <= len(made) <= 3:
        raise ConfigError(what, [f"{wanted}, got {type(made).__name__}"])
    model, args, kwargs = (*made, None)[:3]
    faults = []
    if not isinstance(model, nn.Module):
        faults.append(f"{wanted}: the first is a module, got {type(model).__name__}")
    if not isinstance(args, (tuple, list)):
        faults.append(f"{wanted}: the second is a tuple of arguments, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        faults.append(f"{wanted}: the third is a dict, got {type(kwargs).__name__}")
    if faults:
        raise ConfigError(what, faults)
    return model, tuple(args), kwargs


def _size(text: str | None) -> int | str | None:
    """Return an amount of memory; digits alone are bytes."""
    return int(text) if text is not None and text.isdecimal() else text


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers, such as 8,16") from None


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _degree(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number, or auto") from None
