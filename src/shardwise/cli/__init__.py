"""The command line: parse, call one function, print."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shardwise.cli.checkpoints import convert, inspect
from shardwise.cli.comparisons import diff, verify
from shardwise.cli.layouts import plan, show
from shardwise.cli.machines import bench, demo, doctor, hub
from shardwise.cli.printing import in_shell, say
from shardwise.errors import ShardwiseError
from shardwise.quoting import printable

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Reshard tensors, models and checkpoints: show layouts, plan moves, convert and compare checkpoints.",
    epilog="Layouts are written like 4096x1024/S0@8 or 4096x1024/S0,R@fsdp=4,tp=2.",
)


def _version(wanted: bool) -> None:
    if wanted:
        say(version("shardwise"))
        raise typer.Exit


@app.callback()
def shardwise(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reshard tensors, models and checkpoints from any layout to any other."""


def _stoppable(function: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C ends it with one line and the code of a signal."""

    @wraps(function)
    def stoppable(*args: object, **kwargs: object) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            say("stopped", err=True)
            raise SystemExit(130) from None

    return stoppable


for command in (show, plan, inspect, convert, verify, diff, hub, demo, bench, doctor):  # in the order of the help
    app.command()(_stoppable(command))


def main() -> None:
    """The `shardwise` command. Bad input ends with exit code 2 and one message."""
    try:
        app()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        Console(stderr=True, highlight=False).print("[bold red]error:[/] this command needs torch: pip install torch")
        raise SystemExit(2) from None
    except (ShardwiseError, ValueError, TypeError, OSError, MemoryError) as error:
        message = escape(printable(in_shell(str(error)))) or "out of memory"
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {message}", soft_wrap=True)
        raise SystemExit(2) from None
