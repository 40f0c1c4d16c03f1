"""Markdown tables whose columns line up in a terminal too, and the line above them."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text of a table: the first column is flush left, the others flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(_line(cells, widths) for cells in (header, rule, *rows))


def machine() -> str:
    """Torch version, processor and cores, and the command that was typed."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return (
        f"torch {torch.__version__}, {_processor()}, {os.cpu_count()} cores; "
        f"`python benchmarks/{command}`"
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cells[0].ljust(widths[0])]
    padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return f"| {' | '.join(padded)} |"


def _processor() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
