"""Parses and prints sizes such as ``24GiB``."""

import re
from typing import Tuple, Union

Size = Union[int, float, str]

#: A smaller budget without a unit was probably meant in gigabytes: no model fits in so few bytes.
_BUDGET_BYTES_MIN = 10_000

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power


def parse_size(size: Size, name: str) -> int:
    """Returns bytes from a number or from text such as ``"24GiB"``. ``name`` is for the error."""
    if isinstance(size, (int, float)) and not isinstance(size, bool) and size >= 0 and size == size // 1:
        return int(size)
    if isinstance(size, str):
        number, unit = _split(size)
        if unit in _UNITS:
            return int(float(number) * _UNITS[unit])
    raise ValueError(f'{name}={size!r}: write a number of bytes, or a size such as "24GiB" or "500MB"')


def parse_budget(size: Size, name: str) -> int:
    """The same for a memory budget. Refuses small numbers without a unit, which were probably meant
    in gigabytes."""
    if isinstance(size, str):
        number, unit = _split(size)
    else:
        number, unit = str(size), ""
    if unit == "" and not isinstance(size, bool):
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if 0 < value < _BUDGET_BYTES_MIN:
            raise ValueError(f'{name}={size!r} would be a budget of {value:g} bytes; did you mean {name}="{value:g}GB"?')
    return parse_size(size, name)


def _split(text: str) -> Tuple[str, str]:
    """The number, and the unit in capitals. The unit is unknown if the text is not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    return (match[1], match[2].upper()) if match else (text, "?")


def show_size(size: float) -> str:
    """Formats a size, for example as ``"1.50 GiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
