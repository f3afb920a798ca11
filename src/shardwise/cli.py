"""The command line: parse, call one function, print."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from shardwise import report
from shardwise.errors import ShardwiseError
from shardwise.layout import parse
from shardwise.notation import write_ranges
from shardwise.planning import plan as make_plan
from shardwise.planning import size_in_bytes
from shardwise.quoting import in_line, printable

if TYPE_CHECKING:
    from shardwise.checkpoint import Checkpoint, Rules
    from shardwise.checkpoint.listing import Row

MOST_ROWS = 1000  # of a table with folded columns, which takes rich a third of a millisecond each

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Reshard tensors, models and checkpoints: show layouts, plan moves, convert and compare checkpoints.",
    epilog="Layouts are written like 4096x1024/S0@8 or 4096x1024/S0,R@fsdp=4,tp=2.",
)

C = TypeVar("C", bound=Callable[..., None])


def command(function: C) -> C:
    """Make it a command. Ctrl-C ends it with one line and the code of a signal."""

    @wraps(function)
    def stoppable(*args: object, **kwargs: object) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            _say("stopped", err=True)
            raise SystemExit(130) from None

    app.command()(stoppable)
    return function


LayoutText = Annotated[str, typer.Argument(help="A layout, such as 4096x1024/S0@8", show_default=False)]
Page = Annotated[Path | None, typer.Option(help="Also write an HTML page.")]


SHELL = {  # options as errors of the library name them, and as the shell does
    r"\boverflow=['\"]allow['\"]": "--allow-overflow",
    r"\bwith_config=, or give the folder that has them": "--with-config, or give --config-from FOLDER",
    r"\bwith_config=": "--with-config",
    r"\bkey='([^']*)'": r"--key-file \1",
    r"give key=, .* a file with it": "give --key-file FILE, with a secret that all jobs know",
    r"\bcast=\[\('([^']+)', torch\.(\w+)\)\]": r"--cast '\1=\2'",
}
KEYWORDS = re.compile(
    r"\b(cast|exclude|format|hosts|itemsize|jobs|max_bytes|max_shard_size|merge|objects|other_rules|parameters|rename"
    r"|rules|select|source_rules)=(?:'([\w./*-]+)'|\"([\w./*-]+)\"|(\d+)\b)?(?![\w\[])"
)


def _in_shell(text: str) -> str:
    """With the options of the shell in place of those of Python."""
    for python, shell in SHELL.items():
        text = re.sub(python, shell, text)
    return KEYWORDS.sub(lambda match: _option(*match.groups()), text)


def _option(keyword: str, *values: str | None) -> str:
    """
    >>> _option("max_bytes", "4096"), _option("rules", None)
    ('--max-bytes 4096', '--rules')
    """
    return " ".join([f"--{keyword.replace('_', '-')}", *filter(None, values)])


def _say(text: str, *, err: bool = False) -> None:
    """Print text without control characters: names from files may have some."""
    typer.echo(printable(text), err=err)


def _version(wanted: bool) -> None:
    if wanted:
        _say(version("shardwise"))
        raise typer.Exit


@app.callback()
def shardwise(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Reshard tensors, models and checkpoints from any layout to any other."""


@command
def show(layout: LayoutText, html: Page = None) -> None:
    """Draw which owner holds which cells."""
    parsed = parse(layout).validate()
    terms = "" if parsed.op is None else f", {parsed.terms} terms to {parsed.op}"
    _say(f"{parsed}: shape {parsed.shape} over {len(parsed.owners())} owners{terms}\n")
    _say(report.draw(parsed))
    idle = sorted(set(parsed.owners()).difference(parsed.form.holders.owners.tolist()))
    if idle:
        _say(f"\nnothing on owner{'s' * (len(idle) > 1)} {write_ranges(idle)}")
    if html is not None:
        report.write(html, report.page(parsed))


@command
def plan(
    source: LayoutText,
    target: LayoutText,
    itemsize: Annotated[int | None, typer.Option(help="Bytes per element, by default 4.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the elements: bf16, float32, float8_e4m3fn ...")] = None,
    max_bytes: Annotated[str | None, typer.Option(help="Memory limit for staging per owner, such as 64MiB.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Owners per host.")] = None,
    relabel: Annotated[bool, typer.Option(help="Permute the target's owners so that the fewest bytes move.")] = False,
    verify: Annotated[bool, typer.Option(help="Prove the plan against both layouts.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Also write the plan to this file; - prints it instead of the summary.")
    ] = None,
    html: Page = None,
) -> None:
    """Show what moves from SOURCE to TARGET, and who sends how much to whom."""
    options = {"max_bytes": None if max_bytes is None else size_in_bytes(max_bytes), "hosts": hosts}
    made = make_plan(parse(source), parse(target), itemsize=_itemsize(itemsize, dtype), relabel=relabel, **options)
    if verify:
        made.verify()
    if json == Path("-"):
        _say(made.to_json())
        return
    if json is not None:
        report.write(json, made.to_json())
    if html is not None:
        made.html(html)
    _say(made.explain())
    _say(f"\n{report.matrix(made)}")
    if verify:
        _say("\nverified: every target cell is written exactly once, by an owner that has it")


DTYPE_BITS = re.compile(r"(?:bool|[a-z]+?)(\d+)?(?:_e\d+m\d+\w*)?")  # float32, bf16, uint8, float8_e4m3fn


def _itemsize(itemsize: int | None, dtype: str | None) -> int:
    """
    >>> [_itemsize(None, dtype) for dtype in ("bf16", "float64", "float8_e4m3fn", "bool", None)]
    [2, 8, 1, 1, 4]
    """
    if dtype is None:
        return 4 if itemsize is None else itemsize
    if itemsize is not None:
        raise ValueError("--itemsize and --dtype say the same: give one of them")
    match = DTYPE_BITS.fullmatch(dtype)
    bits = int(match[1] or 0) if match and dtype != "bool" else 8 * (dtype == "bool")
    if bits not in (8, 16, 32, 64, 128):
        raise ValueError(
            f"--dtype {dtype!r} is not a dtype of whole bytes: write bf16, float32 or float8_e4m3fn, or --itemsize"
        )
    return bits // 8


Path_ = Annotated[str, typer.Argument(help="A checkpoint: a file, a directory or a URL.", show_default=False)]
RulesFile = Annotated[
    str | None,
    typer.Option(help="Rules of per-rank files: auto (by config.json), a model such as llama, or a TOML file."),
]
MeshSizes = Annotated[list[str] | None, typer.Option(help="The mesh of those rules: tp=2, repeated for more axes.")]
Renames = Annotated[list[str] | None, typer.Option(help="'model.*=*': the first match wins.")]
Selects = Annotated[list[str] | None, typer.Option(help="Only names that match: 'layers.*'. Repeated for more.")]
Excludes = Annotated[list[str] | None, typer.Option(help="Leave out matching names: 'optimizer.*'. Repeated for more.")]
Merge = Annotated[
    str | None, typer.Option(help="The folder of a LoRA adapter of peft: each weight becomes base + scale * B @ A.")
]
Casts = Annotated[
    list[str] | None,
    typer.Option(
        help="'*.norm.*=float32', '*_scale=keep', and bfloat16 for all other floats. Quantized codes need a full name."
    ),
]
AllowOverflow = Annotated[
    bool, typer.Option("--allow-overflow", help="Also cast values that are out of range of the new dtype.")
]
Concats = Annotated[
    list[str] | None,
    typer.Option(
        help="'*.qkv=*.q,*.k,*.v' in either direction; '@1' along dim 1, ':64,32,32' sizes (by default equal)."
    ),
]
Stacks = Annotated[list[str] | None, typer.Option(help="'*.w=*.experts.{}.w' in either direction; {} is the number.")]
Transposes = Annotated[list[str] | None, typer.Option(help="Names of tensors to transpose (all dims reversed).")]
Interleaves = Annotated[
    list[str] | None,
    typer.Option(
        help="'*.qkv=*.q,*.k,*.v:8,8,8' in either direction: parts that alternate, with their sizes in one group "
        "(one head of q, k and v)."
    ),
]
Rotaries = Annotated[
    list[str] | None,
    typer.Option(
        help="'*.q.weight=halves:128': rotary pairs become halves of heads of 128 cells; 'pairs:128' for the opposite."
    ),
]
Pads = Annotated[
    list[str] | None,
    typer.Option(help="'embed=1024' or 'embed=multiple:64': pad with zeros; a smaller size cuts rows off."),
]
QuantizedTensors = Annotated[
    list[str] | None,
    typer.Option(
        help="'auto' dequantizes all it finds; CODES,SCALES@FORMAT, as in '*.w,*.w_scale@fp8-row', also quantizes."
    ),
]
Names = Annotated[
    str | None,
    typer.Option(help="Names and form of another framework: 'hf' (from Megatron), or 'megatron' (from Hugging Face)."),
]
ObjectsOf = Annotated[
    str | None,
    typer.Option(help="Objects of unknown classes: 'carry' keeps them unchanged, 'drop' leaves them out."),
]
Jobs = Annotated[int, typer.Option(help="Threads.")]
Bar = Annotated[bool, typer.Option(help="Show a progress bar.")]


@command
def inspect(
    checkpoint: Path_,
    all: Annotated[bool, typer.Option("--all", help="One line for each tensor.")] = False,
    filter: Annotated[list[str] | None, typer.Option(help="Only names that match: 'layers.0.*'.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Print at most this many lines.")] = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show names as a tree, with sizes.")] = False,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree; implies --tree.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    html: Page = None,
    rules: RulesFile = None,
    mesh: MeshSizes = None,
) -> None:
    """List the tensors of a checkpoint, without reading their values.

    Tensors that are alike share a line: layers.{0..31}.w are layers.0.w to layers.31.w.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import listing, terminal

    opened = checkpoints.open(checkpoint, rules=_rules(rules, mesh))
    if html is not None:  # before the listing: its reader may close the pipe
        report.write(html, terminal.page(opened))
    if json:
        _say(terminal.as_json(opened))
        return
    rows = list(listing.rows(opened, every=all, only=filter))
    _say(f"{terminal.summary(opened)}\n")
    if tree or depth is not None:
        _wide_console().print(terminal.tree(opened, only=filter, depth=depth), soft_wrap=True)
        return
    _list_rows(rows[:limit])
    if limit is not None and limit < len(rows):
        _say(f"... and {len(rows) - limit:,} more lines")


def _list_rows(rows: Sequence[Row]) -> None:
    """As a table where a person reads; lines are not cut where a program may."""
    from shardwise.checkpoint import listing

    console = Console(highlight=False)
    if console.is_terminal and len(rows) <= MOST_ROWS:
        console.print(listing.table(rows))
    else:
        for line in listing.columns(rows):
            _say(line)


def _wide_console() -> Console:
    """Another program may read the names: do not cut them."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 10_000)
    return console


@command
def convert(
    source: Path_,
    out: Annotated[str, typer.Argument(help="Where to write it.", show_default=False)],
    format: Annotated[
        str | None,
        typer.Option(help="safetensors, sharded, dcp, megatron-dist, torch.save or deepspeed-universal."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Several safetensors files of this size, such as 5GB.")
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            help="How to shard what is written: auto (by the config.json beside the weights), a model such as llama, "
            "gemma or gpt2, the path of a config.json, or a TOML file."
        ),
    ] = None,
    mesh: MeshSizes = None,
    source_rules: RulesFile = None,
    source_mesh: MeshSizes = None,
    rename: Renames = None,
    select: Selects = None,
    exclude: Excludes = None,
    merge: Merge = None,
    cast: Casts = None,
    allow_overflow: AllowOverflow = False,
    concat: Concats = None,
    interleave: Interleaves = None,
    stack: Stacks = None,
    transpose: Transposes = None,
    rotary: Rotaries = None,
    pad: Pads = None,
    quantized: QuantizedTensors = None,
    names: Names = None,
    with_config: Annotated[
        bool, typer.Option("--with-config", help="Also copy config, tokenizer and generation files of SOURCE.")
    ] = False,
    config_from: Annotated[str | None, typer.Option(help="Copy these files of another folder.")] = None,
    parameters: Annotated[
        str | None,
        typer.Option(help="A text file: the names of an optimizer's parameters, one per line, to replace numbers."),
    ] = None,
    objects: ObjectsOf = None,
    jobs: Jobs = 1,
    max_bytes: Annotated[str, typer.Option(help="Memory limit for values.")] = "256MiB",
    verify: Annotated[bool, typer.Option(help="Compare the result with the source.")] = True,
    sums: Annotated[bool, typer.Option(help="Write checksums of every file beside it.")] = True,
    bar: Bar = True,
) -> None:
    """Write a checkpoint in another format, sharding or naming, in little memory.

    If it is interrupted, run the same command again: files that are whole are not written again.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import listing, terminal

    opened = checkpoints.open(source, rules=_rules(source_rules, source_mesh))
    joins = {"quantized": quantized, "concat": concat, "interleave": interleave, "stack": stack}
    rearrangements = {"transpose": transpose, "rotary": rotary, "pad": pad}
    changes = terminal.changes(rename, select, exclude, merge, cast, joins | rearrangements)
    changed = terminal.translated(changes, opened, names)
    with _continued():
        made = checkpoints.convert(
            opened,
            out,
            format=format,
            max_shard_size=max_shard_size,
            rules=_rules(rules, mesh),
            **changed,
            overflow=_overflow(allow_overflow),
            parameters=parameters,
            with_config=config_from if config_from is not None else with_config,
            objects=objects,  # type: ignore[arg-type]
            jobs=jobs,
            max_bytes=size_in_bytes(max_bytes),
            verify=verify,
            sums=sums,
            progress="bar" if bar else None,
        )
    if made.reused:
        again = listing.several(len(made.reused), "file")
        _say(f"reused {again} of an earlier conversion, such as {made.reused[0]}")
    checked = f"; read back, every cell is {_right(opened, made, changed['cast'] or ())}" if verify else ""
    Console(highlight=False).print(f"{escape(terminal.summary(made))}{checked}", soft_wrap=True)
    for line in terminal.fates(opened, made, objects):  # type: ignore[arg-type]
        _say(line)
    for line in terminal.uncopied(opened, made):
        _say(line)


@contextmanager
def _continued() -> Iterator[None]:
    """Print warnings as notes. Ctrl-C exits with the code of a signal, and says what to do next."""
    try:
        with warnings.catch_warnings(record=True) as notes:
            yield
        for note in notes:
            _say(f"note: {note.message}", err=True)
    except KeyboardInterrupt as error:
        again = " to continue; files that are whole are reused" if hasattr(error, "__notes__") else ""
        _say(f"interrupted: run the same command again{again}", err=True)
        raise SystemExit(130) from None


@command
def verify(
    a: Path_,
    b: Annotated[
        str | None, typer.Argument(help="Another checkpoint. Without it, A is checked alone.", show_default=False)
    ] = None,
    rules: RulesFile = None,
    mesh: MeshSizes = None,
    other_rules: RulesFile = None,
    other_mesh: MeshSizes = None,
    rename: Renames = None,
    select: Selects = None,
    exclude: Excludes = None,
    merge: Merge = None,
    cast: Casts = None,
    allow_overflow: AllowOverflow = False,
    concat: Concats = None,
    interleave: Interleaves = None,
    stack: Stacks = None,
    transpose: Transposes = None,
    rotary: Rotaries = None,
    pad: Pads = None,
    quantized: QuantizedTensors = None,
    names: Names = None,
    objects: ObjectsOf = None,
    receipt: Annotated[str | None, typer.Option(help="Compare with this receipt, instead of B.")] = None,
    all: Annotated[bool, typer.Option("--all", help="List all differences, not only the first 20.")] = False,
    jobs: Jobs = 1,
    bar: Bar = True,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes and every cell. Exit code 1 if they differ.

    With the options of convert: compare B, or the receipt, with what A becomes by them. Without B and a receipt: check
    all files of A against the checksums beside them. Exit code 1 where a file is damaged.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import receipts, terminal
    from shardwise.checkpoint.name_groups import rename_between
    from shardwise.checkpoint.selection import Selection

    joins = {"quantized": quantized, "concat": concat, "interleave": interleave, "stack": stack}
    rearrangements = {"transpose": transpose, "rotary": rotary, "pad": pad}
    changed = terminal.changes(rename, select, exclude, merge, cast, joins | rearrangements)
    if names is not None:
        changed = terminal.translated(changed, checkpoints.open(a, rules=_rules(rules, mesh)), names)
    if receipt is not None:
        if b is not None or other_rules is not None or other_mesh or objects is not None:
            raise ValueError("--receipt replaces B: leave out B, and the options of B and of objects")
        opened = checkpoints.open(a, rules=_rules(rules, mesh))
        differences = receipts.compare(
            opened,
            checkpoints.Receipt.from_json(Path(receipt).read_text(encoding="utf-8")),
            **changed,
            overflow=_overflow(allow_overflow),
            jobs=jobs,
            progress="bar" if bar else None,
        )
        _list(differences, "differences", all=all)
        _verdict("equal, by fingerprints", any(changed.values()), opened.path, receipt, differences)
        return
    if b is None:
        if any(changed.values()) or objects is not None or other_rules is not None:
            raise ValueError("options that compare need a second checkpoint, B, or a --receipt")
        _verify_alone(a, _rules(rules, mesh), all=all, jobs=jobs, bar=bar)
        return
    one = checkpoints.open(a, rules=_rules(rules, mesh))
    other = checkpoints.open(b, rules=_rules(other_rules, other_mesh))
    differences = checkpoints.verify(
        one,
        other,
        **changed,
        overflow=_overflow(allow_overflow),
        objects=objects,  # type: ignore[arg-type]
        jobs=jobs,
        progress="bar" if bar else None,
    )
    _list(differences, "differences", all=all)
    for line in terminal.uncompared(one, other, Selection(select, exclude), objects):  # type: ignore[arg-type]
        _say(line)
    if not any(changed.values()) and (hint := rename_between(one, other)) is not None:
        _say(f"the names differ in a prefix: try --rename '{hint[0]}={hint[1]}'")
    _verdict("equal, bit-for-bit", any(changed.values()), one.path, other.path, differences)


def _verdict(equal: str, changed: bool, one: str, other: str, differences: Sequence[object]) -> None:
    """Ends with exit code 1 where they differ."""
    if differences:
        raise SystemExit(1)
    by, both = ", by these options" if changed else "", (escape(in_line(path)) for path in (one, other))
    Console(highlight=False).print(f"{equal}{by}: {' and '.join(both)}", soft_wrap=True)


def _verify_alone(path: str, rules: Rules | None, *, all: bool, jobs: int, bar: bool) -> None:
    """Check a checkpoint against its own checksums."""
    from shardwise import checkpoint as checkpoints

    damaged = checkpoints.verify(path, rules=rules, jobs=jobs, progress="bar" if bar else None)
    _list(damaged, "damaged parts", all=all)
    if damaged:
        raise SystemExit(1)
    Console(highlight=False).print(
        f"whole: every byte of {escape(in_line(path))} matches the checksums that were written with it", soft_wrap=True
    )


def _list(found: Sequence[object], what: str, *, all: bool) -> None:
    """The first differences, or all of them."""
    listed = found if all else found[:20]
    for one in listed:
        _say(_in_shell(str(one)))
    if len(listed) < len(found):
        _say(f"... and {len(found) - len(listed)} more {what}: --all lists them")


def _right(opened: Checkpoint, made: Checkpoint, casts: Sequence[object]) -> str:
    """The verdict on cells that were read back. Quantized codes that were cast by name are not called right."""
    from shardwise.job.casts import PLAIN

    named = [rule[0] for rule in casts if isinstance(rule, tuple) and rule[0] in made]
    dtypes = {tensor.dtype for tensor in (*opened.values(), *(made[name] for name in named))}
    return "as it was cast" if made.lost or (named and not dtypes <= set(PLAIN)) else "right"


def _overflow(allowed: bool) -> Literal["refuse", "allow"]:
    return "allow" if allowed else "refuse"


def _rules(rules: str | None, mesh: list[str] | None) -> Rules | None:
    from shardwise.checkpoint.terminal import rules_on

    return rules_on(rules, mesh or ())


@command
def diff(
    a: Path_,
    b: Path_,
    rename: Renames = None,
    select: Selects = None,
    exclude: Excludes = None,
    limit: Annotated[int, typer.Option(min=1, help="Print at most this many lines.")] = 40,
    jobs: Jobs = 1,
    bar: Bar = True,
) -> None:
    """Show what changed from A to B, by tensor, the largest relative change first. To prove equality, use verify.

    The change of a tensor is the norm of B - A, relative to that of A.
    """
    from shardwise import checkpoint as checkpoints
    from shardwise.checkpoint import changes

    progress: Literal["bar"] | None = "bar" if bar else None
    one, other = checkpoints.open(a), checkpoints.open(b)
    names = {"rename": _pairs(rename), "select": select, "exclude": exclude}
    found = changes.changes(one, other, **names, jobs=jobs, progress=progress)  # type: ignore[arg-type]
    for line in changes.lines(found, limit):
        _say(line)


def _pairs(rename: list[str] | None) -> list[tuple[str, str]] | None:
    from shardwise.checkpoint.terminal import pairs

    return pairs(rename or (), "--rename") or None


@command
def hub(
    port: Annotated[int | None, typer.Option(help="The port to listen on.", show_default=False)] = None,
    host: Annotated[str, typer.Option(help="The address of this host to listen on.")] = "127.0.0.1",
    file: Annotated[Path | None, typer.Option(help="Instead of a port: a file, for jobs of this host.")] = None,
    key_file: Annotated[Path | None, typer.Option(help="A file with the secret that all jobs know (key=).")] = None,
) -> None:
    """Run a meeting point for sw.publish and sw.subscribe, until it is interrupted.

    It outlives publishers and subscribers. It holds small entries, and no weights.
    """
    if (port is None) == (file is None):
        raise typer.BadParameter("give --port, or --file for jobs of this host")
    from shardwise.publishing.hub import hub as hold
    from shardwise.publishing.meeting import Address

    where = Address(file=file.absolute()) if file is not None else Address.of(f"{host}:{port}")
    with suppress(KeyboardInterrupt):
        hold(where, key_file, lambda at: _say(f"meeting point {at}: interrupt to end it"))


@command
def demo(
    out: Annotated[Path, typer.Option(help="The folder for the checkpoints and the page.")] = Path("demo"),
) -> None:
    """Demonstrate in one minute: save, plan, convert, load, sync and publish a small model, on this machine."""
    from shardwise.demo import run

    run(Console(), out)


@command
def bench(
    ranks: Annotated[int, typer.Option(help="Processes of this machine.")] = 4,
    size: Annotated[str, typer.Option(help="The size of the moved tensor, such as 256MiB.")] = "64MiB",
    device: Annotated[str, typer.Option(help="cpu, or cuda: a GPU of this machine for each process.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Time a few moves on this machine: over each transport, with torch's functions, and as plain memory copies."""
    from shardwise import bench as benchmark

    bytes_moved, console = size_in_bytes(size), Console(highlight=False)
    if json:
        _say(benchmark.as_json(list(benchmark.bench(ranks, bytes_moved, device)), ranks, bytes_moved, device))
        return
    with console.status(f"{size} of float32 on {ranks} processes"):
        moves = list(benchmark.bench(ranks, bytes_moved, device))
    console.print(benchmark.table(moves))
    console.print(benchmark.LEGEND.format(size=size, ranks=ranks), style="dim")


@command
def doctor() -> None:
    """Report what this machine can do, and what to change. Exit code 1 if there is something to change.

    Under torchrun (torchrun ... -m shardwise doctor) also how the ranks of the job reach each other. The first prints.
    """
    from shardwise.doctor import examine

    findings = list(examine())
    if os.environ.get("RANK", "0") == "0":
        for found in findings:
            _say(f"{found.verdict:5}{found.what}" + (f": {found.fix}" if found.fix else ""))
    if any(found.fix for found in findings):
        raise SystemExit(1)


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
        message = escape(printable(_in_shell(str(error)))) or "out of memory"
        Console(stderr=True, highlight=False).print(f"[bold red]error:[/] {message}", soft_wrap=True)
        raise SystemExit(2) from None
