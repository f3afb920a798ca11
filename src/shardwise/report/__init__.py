"""Layouts, plans and whole models as pictures: text, one self-contained HTML page, a figure for papers.

Pure: it looks at values, and runs nothing.
"""

from shardwise.report.html import page, write
from shardwise.report.notebook import glance, listed
from shardwise.report.plot import figure
from shardwise.report.rows import Row
from shardwise.report.text import draw, matrix

__all__ = ["Row", "draw", "figure", "glance", "listed", "matrix", "page", "write"]
