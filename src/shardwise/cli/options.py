"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Page = Annotated[Path | None, typer.Option(help="Also write an HTML page.")]
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
