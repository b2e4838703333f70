"""Sizes as people write them."""

import re
from typing import Union

Size = Union[int, str]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_size(size: Size, name: str) -> int:
    """Bytes, from a number of them or from text such as ``"24GiB"``; ``name`` is for the error."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match and match[2].upper() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    raise ValueError(f'{name}={size!r}: write a number of bytes, or a size such as "24GiB" or "500MB"')


def show_size(size: float) -> str:
    """``"1.50 GiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
