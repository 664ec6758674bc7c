"""How numbers are said: the same words on pages, in traces and in the terminal."""

from __future__ import annotations

import dataclasses
import difflib
import html
import math
import re
import signal
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_UNITS = (("s", 1e9), ("ms", 1e6), ("us", 1e3), ("ns", 1.0))
_BRIEF = 80
"""Characters of an item that brief() shows whole."""
_STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's controls, marks that turn the direction of writing, half characters and ends of lines."""


def duration(value_ns: float) -> str:
    """Three digits in the unit that a person would use: 950 ns, 1.25 us, 17.3 ms; "unknown" for nan."""
    if math.isnan(value_ns):
        return "unknown"
    unit, size = unit_for(value_ns)
    return f"{value_ns:,.0f} ns" if unit == "ns" else f"{three_digits(value_ns / size)} {unit}"


def shown(value: object) -> str:
    """Returns the repr of what a user has passed, on one line and short."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def size(num_bytes: float) -> str:
    """Bytes in units of 1024: "1.5 GiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = next((power for power in range(len(units)) if num_bytes < 1024 ** (power + 1)), len(units) - 1)
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {units[power]}"


def ago(seconds: float) -> str:
    """ "40 s ago", "12 min ago", "3 h ago", "5 days ago"."""
    for limit, size, unit in ((120, 1, "s"), (120 * 60, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) // size:.0f} {unit} ago"
    return f"{seconds // 86400:,.0f} days ago"


def three_digits(value: float) -> str:
    """1.25, 12.5, 125; of more all before the point: 1,250."""
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}"


def is_share(metric: str) -> bool:
    """Whether a metric of a run (tracekern.analysis.statistics) is a share of a time; all others are durations."""
    return metric.endswith(".wait_share")


def metric_value(metric: str, value: float) -> str:
    """A metric of a run (tracekern.analysis.statistics): its share of a time as "12.5 %", any other as a duration."""
    return f"{100 * value:.3g} %" if is_share(metric) else duration(value)


def round_duration(value_ns: float) -> str:
    """The same of a round number, for the ticks of an axis: 1 us, 10 us."""
    unit, size = unit_for(value_ns)
    return f"{value_ns / size:g} {unit}"


def factor(value: float) -> str:
    """Three digits: 1.25 x, 12.5 x, 125 x."""
    return f"{three_digits(value)} x"


def growth(value: float) -> str:
    """0.153 as "+15.3 %"; from ten times on a factor, 23.6 x."""
    if not math.isfinite(value):
        return "?"
    return f"{round(100 * value, 1) + 0.0:+.1f} %" if abs(value) < 10 else factor(1 + value)  # -0.0 + 0.0 is 0.0


def unit_for(value_ns: float) -> tuple[str, float]:
    """The largest unit that `value_ns` fills once, rounded to three digits, and its ns."""
    return next((entry for entry in _UNITS if abs(value_ns) >= 0.9995 * entry[1]), _UNITS[-1])


def percent(part: float, whole: float) -> str:
    """ "25 %"; two digits below ten; "-" of nothing."""
    if not whole:
        return "-"
    share = 100 * part / whole
    return f"{share:.0f} %" if share >= 10 or share == 0 else "<0.1 %" if share < 0.1 else f"{share:.1f} %"


def count(number: int, thing: str) -> str:
    """ "1 rank", "4 ranks", "4 launches"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith("ch") else "s")


def ranks(numbers: list[int] | tuple[int, ...]) -> str:
    """ "rank 3", "ranks 1, 2 and 5", "ranks 0, 1, 2, 3 and 60 more"."""
    shown = [str(number) for number in numbers[:4]]
    if len(numbers) > 4:
        return f"ranks {', '.join(shown)} and {len(numbers) - 4} more"
    if len(shown) == 1:
        return f"rank {shown[0]}"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}" if shown else "no rank"


def signal_name(returncode: int) -> str:
    """ "SIGKILL" for the exit status -9 of a process; "signal 40" for a signal without a name, "" for none."""
    try:
        return signal.Signals(-returncode).name if returncode < 0 else ""
    except ValueError:  # most of the real-time signals
        return f"signal {-returncode}"


def number_ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def sentence(text: str) -> str:
    """With a capital at its begin and a full stop at its end."""
    return f"{text[0].upper()}{text[1:]}."


def first_of_each(texts: Iterable[str]) -> list[str]:
    """The first of all texts that differ in numbers only, with how many more there are."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(re.sub(r"\d+", "", text), []).append(text)
    return [f"{first} (and {len(more)} more like this)" if more else first for first, *more in alike.values()]


def without_nan(value: Any) -> Any:
    """A JSON value with "nan", "inf" and "-inf" for these numbers. JSON lacks them, and nan differs from itself."""
    if isinstance(value, dict):
        return {key: without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value


def whole_number(text: str) -> int | None:
    """The number that a text of up to 18 digits spells; None for any other. Unlike str.isdigit() it takes what int()
    takes, and no more digits than an int64 holds: int() refuses thousands of them."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def similar(name: str, known: Iterable[str]) -> str:
    """What a misspelt name may have meant: "similar are wait_token, wait_block", or else "there are ..."."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"similar are {', '.join(near)}" if near else f"there are {', '.join(names[:6]) or 'none'}"


def argument(path: Path) -> str:
    """A path as an argument of a command, not quoted: ./-x for -x, which the command would take for an option."""
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def printable(text: str) -> str:
    r"""Text from a capture, or a path, on one line: "\x1b" and "\n" for characters that would steer a terminal or break
    the line, "\udcff" for the byte of a file's name that is no UTF-8, which no stream and no file in UTF-8 takes."""
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _STEERING else char for char in text
    )


def escape(text: object) -> str:
    """Text from a capture, safe in HTML and in the little HTML that Plotly reads."""
    return html.escape(printable(str(text)), quote=True)


def brief(value: Any) -> str:
    """Returns one short line, for the `__repr__` of a dataclass that holds columns, tables or many items."""
    fields = [(entry.name, getattr(value, entry.name)) for entry in dataclasses.fields(value) if entry.repr]
    return f"{type(value).__name__}({', '.join(f'{name}={_brief(item)}' for name, item in fields)})"


def _brief(item: Any) -> str:
    if hasattr(item, "dtype") and hasattr(item, "shape"):
        return f"<{item.dtype}[{', '.join(map(str, item.shape))}]>"
    if isinstance(item, tuple | list | dict) and len(item) > 3:
        return f"<{type(item).__name__} of {len(item):,}>"
    text = repr(item)
    return text if len(text) <= _BRIEF else f"<{type(item).__name__}>"
