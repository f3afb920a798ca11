"""Quantized tensors: codes and scales that are one tensor, with coupled layouts."""

from shardwise.quantized.formats import FORMATS, Format
from shardwise.quantized.layouts import scales_layout
from shardwise.quantized.recognition import Quantized, QuantizedTensor, recognize
from shardwise.quantized.tensors import dequantize, quantize

__all__ = [
    "FORMATS",
    "Format",
    "Quantized",
    "QuantizedTensor",
    "dequantize",
    "quantize",
    "recognize",
    "scales_layout",
]
