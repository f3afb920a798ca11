"""Quantised tensors: codes and scales that are one tensor, with coupled layouts."""

from shardwise.quantised.formats import FORMATS, Format
from shardwise.quantised.layouts import scales_layout
from shardwise.quantised.recognition import Quantised, QuantisedTensor, recognise
from shardwise.quantised.tensors import dequantise, quantise

__all__ = [
    "FORMATS",
    "Format",
    "Quantised",
    "QuantisedTensor",
    "dequantise",
    "quantise",
    "recognise",
    "scales_layout",
]
