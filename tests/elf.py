"""Just enough of ELF64 (objects of g++, cubins of nvcc) to compare functions byte by byte."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = struct.Struct("<QQq")
SYMTAB, RELA = 2, 4


@dataclass(frozen=True)
class Section:
    kind: int
    link: int
    info: int
    entry_bytes: int  # size of one constant in a section of constants, else 0
    data: bytes


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def read_sections(path: Path) -> dict[str, Section]:
    """Name -> section; a name that occurs twice keeps the first."""
    return dict(reversed(_all_sections(path.read_bytes())))


def _all_sections(data: bytes) -> list[tuple[str, Section]]:
    assert data[:5] == b"\x7fELF\x02"
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_idx = struct.unpack_from("<HHH", data, 0x3A)
    raw = [SECTION.unpack_from(data, offset + size * i) for i in range(count)]
    names = data[raw[names_idx][4] :][: raw[names_idx][5]]
    return [(_text(names, e[0]), Section(e[1], e[6], e[7], e[9], _cut(data, e))) for e in raw]


def _cut(data: bytes, entry: tuple[int, ...]) -> bytes:
    no_bits = 8
    return b"" if entry[1] == no_bits else data[entry[4] : entry[4] + entry[5]]


def functions(path: Path) -> dict[str, tuple[bytes, tuple[tuple[int, str], ...]]]:
    """Function -> its code, and what the linker puts in: (offset, target). Needs -ffunction-sections."""
    sections = _all_sections(path.read_bytes())
    symtab_idx = next(i for i, (_, section) in enumerate(sections) if section.kind == SYMTAB)
    symtab = sections[symtab_idx][1]
    strings = sections[symtab.link][1].data
    symbols = list(SYMBOL.iter_unpack(symtab.data))

    def target(info: int, addend: int) -> str:
        """What a relocation points to, by name, or by value where there is none that lasts: a constant."""
        name, _, _, section_idx, value, _ = symbols[info >> 32]
        text = _text(strings, name)
        if text and not text.startswith(".LC"):
            return f"{text}{addend:+}"
        section_name, section = sections[section_idx]
        from_end_of_instruction = 4
        start = value + addend + from_end_of_instruction
        return f"{section_name}:{section.data[start : start + section.entry_bytes].hex()}"

    relocations: dict[int, tuple[tuple[int, str], ...]] = {}
    for _, section in sections:
        if section.kind == RELA:
            entries = RELOCATION.iter_unpack(section.data)
            relocations[section.info] = tuple((at, target(info, addend)) for at, info, addend in entries)
    found = {}
    function_type = 2
    for name, info, _, section_idx, value, size in symbols:
        if info & 15 == function_type and section_idx < len(sections):
            code = sections[section_idx][1].data[value : value + size]
            found[_text(strings, name)] = (code, relocations.get(section_idx, ()))
    return found
