"""Which tensors are the codes and the scales of one quantized tensor: by names, dtypes, shapes and config.json."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.job.names import filled, matched
from shardwise.quantized.formats import (
    FP8_BLOCK,
    FP8_ROW,
    FP8_TENSOR,
    INT8_ROW,
    INT8_SCB,
    MXFP4,
    MXFP8,
    VALUES,
    Format,
    Shape,
    format_of,
)
from shardwise.quantized.layouts import wrong_shape

# a quant_method of config.json whose tensors may have these formats
METHODS = ("fp8", "mxfp4", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "modelopt")


class KnownTensor(Protocol):
    """What has a shape and a dtype: a tensor of a state dict, or one of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""


KnownTensors = Mapping[str, KnownTensor]


class Naming(NamedTuple):
    """How quantizers call the three names of a tensor; `codes` and `scales` are endings."""

    value: str
    codes: str
    scales: str
    formats: tuple[Format, ...]
    certain: bool  # a name with the ending of scales is a scale, also where there are no codes beside it


FP8_SCALES = (FP8_TENSOR, FP8_ROW, FP8_BLOCK, MXFP8, INT8_ROW)
NAMINGS = (
    Naming("", "_blocks", "_scales", (MXFP4,), certain=False),
    Naming(".weight", ".weight", ".SCB", (INT8_SCB,), certain=True),
    Naming("", "", "_scale_inv", FP8_SCALES, certain=True),
    Naming(".weight", ".weight", ".weight_scale", FP8_SCALES, certain=True),
    Naming("", "", "_scale", FP8_SCALES, certain=False),
)


@dataclass(frozen=True)
class QuantizedTensor:
    """Two tensors that are one: the names of values, codes and scales, the format, and what codes and scales are."""

    value: str
    codes: str
    scales: str
    format: Format
    codes_shape: Shape
    scales_shape: Shape
    scales_dtype: torch.dtype

    @staticmethod
    def new(names: tuple[str, str, str], format: Format, shape: Shape, dtype: torch.dtype) -> QuantizedTensor:
        """Of values of this shape, with scales of this dtype."""
        return QuantizedTensor(*names, format, format.codes_shape(shape), format.grid(shape), dtype)

    @property
    def shape(self) -> Shape:
        """Of the values."""
        return self.format.value_shape(self.codes_shape)


@dataclass(frozen=True)
class Quantized:
    """A rule for `remap=`: these tensors are quantized, and their codes and scales are one tensor.

    Values become codes and scales, or these become values, as the other side needs it. Without names, all quantized
    tensors are found by their names, dtypes and shapes. With names, stars stand for the same in all of them; `format`
    is one of fp8-block, fp8-row, fp8-tensor, int8-row, int8-scb, mxfp8 and mxfp4, or a `Format`. `value` is the name of
    the values, by default that of the codes. `dtype` is that of the values in a conversion, if `cast=` gives no other.

    >>> Quantized("*.weight", "*.weight_scale_inv", format="fp8-block").of_value("layers.0.up.weight", ())
    ('layers.0.up.weight', 'layers.0.up.weight', 'layers.0.up.weight_scale_inv')
    """

    codes: str | None = None
    scales: str | None = None
    format: Format | str | None = None
    value: str | None = None
    block: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if (self.codes is None) != (self.scales is None):
            raise RefusedTypeError(f"{self} needs the names of both codes and scales, or of none")
        if self.codes is None and (self.format is not None or self.value is not None):
            raise RefusedTypeError(f"{self} needs the names of codes and scales: format= and value= are of these")
        if self.codes is not None and self.format is None:
            raise RefusedTypeError(f"{self} needs format=, such as 'fp8-block'")
        if self.dtype not in VALUES:
            raise RefusedTypeError(f"{self}: values are float32, bfloat16 or float16, not {self.dtype}")
        self.known_format()

    def known_format(self) -> Format | None:
        """With its blocks; None where it is to be found."""
        found = None if self.format is None else format_of(self.format)
        return found if found is None or self.block is None else found.with_block(self.block)

    def of_value(self, value: str, names: Collection[str]) -> tuple[str, str, str] | None:
        """The names of values, codes and scales, if `value` is that of values; None where it is not."""
        return self._filled(self.value or self.codes, value, names)

    def of_codes(self, codes: str, names: Collection[str]) -> tuple[str, str, str] | None:
        """The same by the name of the codes."""
        return self._filled(self.codes, codes, names)

    def of_scales(self, scales: str, names: Collection[str]) -> tuple[str, str, str] | None:
        """The same by the name of the scales."""
        return self._filled(self.scales, scales, names)

    def _filled(self, pattern: str | None, name: str, names: Collection[str]) -> tuple[str, str, str] | None:
        stars = None if pattern is None else matched(pattern, name, names)
        if stars is None:
            return None
        value, codes, scales = (filled(one or "", stars) for one in (self.value or self.codes, self.codes, self.scales))
        return value, codes, scales


def recognize(tensors: KnownTensors, rules: Iterable[Quantized], config: object = None) -> dict[str, QuantizedTensor]:
    """The quantized tensors of a side, by the names of their values.

    Refused are scales without codes, codes without scales, and shapes or dtypes that do not fit.

    >>> tensors = {"w": torch.empty(256, 256, dtype=torch.float8_e4m3fn), "w_scale_inv": torch.empty(2, 2)}
    >>> recognize(tensors, [Quantized()])["w"].format.name
    'fp8-block'
    """
    found = dict[str, QuantizedTensor]()
    for rule in rules:
        several = _by_convention(tensors, rule, config) if rule.codes is None else _by_rule(tensors, rule)
        for one in several:
            if one.value in found and found[one.value] != one:
                raise RefusedValueError(f"{one.value!r} is given by two Quantized rules: leave one out")
            if one.value in tensors and one.value not in (one.codes, one.scales):
                raise RefusedValueError(
                    f"{one.value!r} is there both as values and as codes {one.codes!r}: leave one out"
                )
            found[one.value] = one
    return found


def _by_rule(tensors: KnownTensors, rule: Quantized) -> list[QuantizedTensor]:
    """Those that a rule names, where this side has codes."""
    format, found = rule.known_format(), list[QuantizedTensor]()
    assert format is not None
    for name in tensors:
        names = rule.of_codes(name, tensors)
        if names is not None and tensors[name].dtype == format.codes:
            found.append(_checked(names, tensors, (format,), [names[2]]))
        scaled = rule.of_scales(name, tensors) if names is None else None
        if scaled is not None and scaled[1] not in tensors and scaled[0] not in tensors:
            raise RefusedValueError(_lone_scale(name, [scaled[1]]))
    return found


def _by_convention(tensors: KnownTensors, rule: Quantized, config: object) -> list[QuantizedTensor]:
    """All that are called as quantizers call them."""
    block = rule.block or config_block(config)
    found, taken = list[QuantizedTensor](), set[str]()
    for name in tensors:
        for naming in NAMINGS:
            base = name.removesuffix(naming.scales)
            codes = base + naming.codes
            if base == name or name in taken:
                continue
            if codes in tensors and tensors[codes].dtype in _dtypes(naming):
                formats = tuple(one.with_block(block) if one is FP8_BLOCK and block else one for one in naming.formats)
                found.append(_checked((base + naming.value, codes, name), tensors, formats, [name]))
                taken.update((codes, name))
            elif naming.certain and codes not in tensors:
                raise RefusedValueError(_lone_scale(name, [codes]))
    for name in tensors:
        if name not in taken and tensors[name].dtype == torch.float8_e4m3fn:
            raise RefusedValueError(_lone_codes(name, tensors[name].dtype, [f"{name}_scale_inv", f"{name}_scale"]))
    return found


def _dtypes(naming: Naming) -> set[torch.dtype]:
    return {one.codes for one in naming.formats}


def _checked(
    names: tuple[str, str, str], tensors: KnownTensors, formats: Sequence[Format], wanted: Sequence[str]
) -> QuantizedTensor:
    """The first format that dtypes and shapes fit; refused where none does."""
    value, codes, scales = names
    if scales not in tensors:
        raise RefusedValueError(_lone_codes(codes, tensors[codes].dtype, wanted))
    both = [(tuple(tensors[one].shape), tensors[one].dtype) for one in (codes, scales)]
    (shape, dtype), (grid, scale) = both
    typed = [one for one in formats if one.codes == dtype and scale in one.scales]
    if not typed:
        raise RefusedValueError(
            f"{scales!r} is {scale}, and {codes!r} is {dtype}: no format has these. Scales are float32, bfloat16, "
            f"float16 or exponents (uint8, float8_e8m0fnu)"
        )
    for format in typed:
        if format.fits(shape, grid):
            return QuantizedTensor(value, codes, scales, format, shape, grid, scale)
    likely = next((one for one in typed if one.block[0] not in (1, None)), typed[0])
    more = "" if len(typed) == 1 else f" (or those of {', '.join(one.name for one in typed if one is not likely)})"
    if likely.pairs and (len(shape) < 2 or shape[-1] != 16):
        raise RefusedValueError(
            f"{codes!r} has shape {shape}, but codes in {likely.name} have 16 bytes in the last dim"
        )
    raise RefusedValueError(f"{wrong_shape(repr(codes), shape, grid, likely)}{more}: {scales!r} does not fit")


def _lone_scale(name: str, codes: Sequence[str]) -> str:
    return f"{name!r} is a scale, but its codes {codes[0]!r} are not there: give both, or leave it out"


def _lone_codes(name: str, dtype: torch.dtype, scales: Sequence[str]) -> str:
    wanted = " or ".join(map(repr, scales))
    return (
        f"{name!r} is {dtype}, which are codes, but there are no scales {wanted}: if they have another name, give it, "
        f"as in Quantized({name!r}, 'name.of.scales', format='fp8-block')"
    )


def config_block(config: object) -> tuple[int, int] | None:
    """The blocks of fp8 that the config.json of a model gives; None where it gives none.

    >>> config_block({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    (128, 128)
    """
    quantization = config.get("quantization_config") if isinstance(config, Mapping) else None
    if not isinstance(quantization, Mapping):
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method not in METHODS:
        raise RefusedValueError(f"config.json says quant_method {method!r}: only {', '.join(METHODS)} are understood")
    if block is None:
        return None
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(size, int) for size in block):
        raise RefusedValueError(f"config.json says weight_block_size {block!r}, which is not two whole numbers")
    return block[0], block[1]
