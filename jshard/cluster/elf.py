"""Shared libraries as bytes, for 64-bit Linux on x86: what one needs of others is read, and small ones are written.

The names of the tables and fields are those of the ELF specification, and of GNU's symbol versions (LSB).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian

# Section types, and tags of the dynamic section.
_SHT_DYNAMIC = 6
_SHT_DYNSYM = 11
_SHT_GNU_VERNEED = 0x6FFFFFFE
_SHT_GNU_VERSYM = 0x6FFFFFFF
_DT_NULL = 0
_DT_NEEDED = 1
_DT_HASH = 4
_DT_STRTAB = 5
_DT_SYMTAB = 6
_DT_STRSZ = 10
_DT_SYMENT = 11
_DT_SONAME = 14
_DT_VERSYM = 0x6FFFFFF0
_DT_VERDEF = 0x6FFFFFFC
_DT_VERDEFNUM = 0x6FFFFFFD

_SYMBOL_FORM = "<IBBHQQ"  # name, info, other, section, value, size
_SYMBOL_BYTES = struct.calcsize(_SYMBOL_FORM)
_GLOBAL = 1  # the binding of a symbol that must be found; a weak one may be absent
_GLOBAL_FUNCTION = 0x12
_HIDDEN = 0x8000  # a bit of a symbol's version beside its number


class ElfError(ValueError):
    """A file that is not a shared library, or that cannot be read as one."""


# ---- reading


@dataclasses.dataclass(frozen=True)
class Import:
    """A function or variable that a library takes from another one."""

    name: str
    library: str  # the file name of the other one; empty if the tables do not say it
    version: str  # of the symbol; empty for none


@dataclasses.dataclass(frozen=True)
class Imports:
    """What a library takes from others.

    Attributes:
        libraries: the file names of those that it needs, in the order in which they are loaded.
        symbols: what it takes from them.
    """

    libraries: Sequence[str]
    symbols: Sequence[Import]


@dataclasses.dataclass(frozen=True)
class _Section:
    """An entry of the section table."""

    kind: int
    offset: int
    size: int
    link: int  # index of the section with its texts


@dataclasses.dataclass(frozen=True)
class _Source:
    """The library and version of symbols."""

    library: str = ""
    version: str = ""


def read_imports(path: Path) -> Imports:
    """Reads what a shared library takes from others, without loading it.

    Raises:
        ElfError: it is not a shared library for 64-bit Linux, or has no table of versions.
    """
    with path.open("rb") as file:
        # Before it is mapped: an empty file cannot be.
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ElfError(f"{path} is not a shared library for 64-bit Linux.")
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with content:
        try:
            return _Library(content).imports()
        except (KeyError, IndexError, UnicodeDecodeError, struct.error) as error:
            raise ElfError(f"{path} has no table of symbols, or a damaged one: {error!r}.") from error


class _Library:
    """The tables of a shared library."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        (start,) = self._unpacked("<Q", 0x28)  # e_shoff of the header
        size, count = self._unpacked("<HH", 0x3A)  # e_shentsize, e_shnum
        self._sections = [self._section(start + i * size) for i in range(count)]
        self._by_kind = {section.kind: section for section in reversed(self._sections)}  # the first of each kind
        symbols = self._by_kind[_SHT_DYNSYM]
        self._texts_at = self._sections[symbols.link].offset

    def imports(self) -> Imports:
        """Returns what it takes from others."""
        return Imports(tuple(self._needed()), tuple(self._undefined()))

    def _unpacked(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(form, self._content, offset)

    def _section(self, offset: int) -> _Section:
        _, kind, _, _, start, size, link, _, _, _ = self._unpacked("<IIQQQQIIQQ", offset)
        return _Section(kind, start, size, link)

    def _text(self, offset: int) -> str:
        """Returns a text of the table that symbols, versions and tags share."""
        start = self._texts_at + offset
        return self._content[start : self._content.find(b"\0", start)].decode()

    def _needed(self) -> Iterator[str]:
        """Yields the file names of the libraries that it needs."""
        dynamic = self._by_kind[_SHT_DYNAMIC]
        for offset in range(dynamic.offset, dynamic.offset + dynamic.size, 16):
            tag, value = self._unpacked("<QQ", offset)
            if tag == _DT_NULL:
                return
            if tag == _DT_NEEDED:
                yield self._text(value)

    def _undefined(self) -> Iterator[Import]:
        """Yields the symbols that it does not define, and that must be found."""
        symbols = self._by_kind[_SHT_DYNSYM]
        versions = self._by_kind[_SHT_GNU_VERSYM]
        sources = self._sources()
        for i in range(1, symbols.size // _SYMBOL_BYTES):  # the first one is empty
            name, info, _, section, _, _ = self._unpacked(_SYMBOL_FORM, symbols.offset + i * _SYMBOL_BYTES)
            if section or info >> 4 != _GLOBAL:
                continue
            (index,) = self._unpacked("<H", versions.offset + i * 2)
            source = sources.get(index & ~_HIDDEN, _Source())
            yield Import(self._text(name), source.library, source.version)

    def _sources(self) -> dict[int, _Source]:
        """Returns the library and version that a number stands for in the table of versions."""
        sources: dict[int, _Source] = {}
        offset = self._by_kind[_SHT_GNU_VERNEED].offset
        while True:
            _, count, library, first, following = self._unpacked("<HHIII", offset)
            version_offset = offset + first
            for _ in range(count):
                _, _, index, version, step = self._unpacked("<IHHII", version_offset)
                sources[index] = _Source(self._text(library), self._text(version))
                version_offset += step
            if not following:
                return sources
            offset += following


def by_library(symbols: Sequence[Import]) -> dict[str, list[Import]]:
    """Returns symbols by the library that they are taken from; those of an unknown one under ""."""
    groups = collections.defaultdict[str, list[Import]](list)
    for symbol in symbols:
        groups[symbol.library].append(symbol)
    return dict(groups)


# ---- writing

_PAGE_BYTES = 4096
_HEADER_BYTES = 64
_PROGRAM_HEADER_BYTES = 56
_NUM_PROGRAM_HEADERS = 3
_READABLE, _WRITABLE, _EXECUTABLE = 4, 2, 1
_PT_LOAD, _PT_DYNAMIC = 1, 2


@dataclasses.dataclass(frozen=True)
class Code:
    """The machine code of a function."""

    instructions: bytes
    # If not None, the code ends with the distance to these bytes, which are writable, and returns their address.
    address_of: bytes | None = None

    @classmethod
    def returning(cls, value: int) -> Code:
        """Returns the code of a function that returns an integer."""
        return cls(b"\xb8" + struct.pack("<i", value) + b"\xc3")  # mov eax, value; ret

    @classmethod
    def returning_address(cls, content: bytes) -> Code:
        """Returns the code of a function that returns a pointer to bytes."""
        return cls(b"\x48\x8d\x05", content)  # lea rax, [rip + distance]

    @classmethod
    def storing_zero(cls, value: int) -> Code:
        """Returns the code of a function that sets the `int` of its first argument to 0 and returns an integer."""
        return cls(b"\xc7\x07" + struct.pack("<i", 0) + cls.returning(value).instructions)  # mov dword [rdi], 0; ...

    def placed(self, at: int, content_at: int) -> bytes:
        """Returns its instructions at an address, given that of its bytes."""
        if self.address_of is None:
            return self.instructions
        end = at + len(self.instructions) + 4
        return self.instructions + struct.pack("<i", content_at - end) + b"\xc3"


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of a library to write."""

    name: str
    version: str  # of the symbol; empty for none
    code: Code


class _Texts:
    """A table of texts, each of which is stored once."""

    def __init__(self) -> None:
        self.content = bytearray(b"\0")
        self._offsets: dict[str, int] = {}

    def offset(self, text: str) -> int:
        """Returns the offset of a text, which is added if it is not there."""
        if text not in self._offsets:
            self._offsets[text] = len(self.content)
            self.content += text.encode() + b"\0"
        return self._offsets[text]


@dataclasses.dataclass
class _Segment:
    """A part of the file that is loaded where it is in the file."""

    start: int
    content: bytearray = dataclasses.field(default_factory=bytearray)

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.start + len(self.content)

    def add(self, content: bytes | bytearray) -> int:
        """Adds bytes at the next multiple of 16, and returns their address."""
        self.content += b"\0" * (-len(self.content) % 16)
        address = self.end
        self.content += content
        return address


def shared_library(soname: str, functions: Sequence[Function]) -> bytes:
    """Returns a shared library for 64-bit Linux on x86 with functions that compute nothing.

    Args:
        soname: its name, by which the loader knows it once it is loaded.
        functions: what it defines.
    """
    return _LibraryWriter(soname, functions).library()


class _LibraryWriter:
    """The parts of a library to write.

    The loader reads the program headers only, so there are no sections. Headers, code and tables are one segment;
    the dynamic section and the bytes that functions return are another one, which is writable.
    """

    def __init__(self, soname: str, functions: Sequence[Function]) -> None:
        self._soname = soname
        self._functions = functions
        self._versions = [version for version in dict.fromkeys(f.version for f in functions) if version]
        self._texts = _Texts()
        self._fixed = _Segment(_HEADER_BYTES + _NUM_PROGRAM_HEADERS * _PROGRAM_HEADER_BYTES)
        self._codes = list(dict.fromkeys(function.code for function in functions))

    def library(self) -> bytes:
        """Returns the content of the file."""
        writable = _Segment(self._writable_start())
        contents_at = {code: writable.add(code.address_of or b"") for code in self._codes}
        codes_at = self._add_code(contents_at)
        tags = self._add_tables(codes_at)
        dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in (*tags.items(), (_DT_NULL, 0)))
        dynamic_at = writable.add(dynamic)
        assert self._fixed.end <= writable.start

        headers = self._file_header()
        headers += _program_header(_PT_LOAD, _READABLE | _EXECUTABLE, 0, self._fixed.end)
        headers += _program_header(_PT_LOAD, _READABLE | _WRITABLE, writable.start, len(writable.content))
        headers += _program_header(_PT_DYNAMIC, _READABLE | _WRITABLE, dynamic_at, len(dynamic))
        return (headers + self._fixed.content).ljust(writable.start, b"\0") + writable.content

    def _writable_start(self) -> int:
        """Returns the start of the writable segment, at a page behind all that the other one may hold."""
        names = [self._soname, *self._versions, *(function.name for function in self._functions)]
        text_bytes = sum(len(name) + 1 for name in names)
        code_bytes = sum(len(code.instructions) + 32 for code in self._codes)
        symbol_bytes = (len(self._functions) + 1) * (_SYMBOL_BYTES + 2 + 4)  # with their versions and hash chain
        version_bytes = (len(self._versions) + 1) * 28
        most_bytes = self._fixed.start + text_bytes + code_bytes + symbol_bytes + version_bytes + 1024
        return -(-most_bytes // _PAGE_BYTES) * _PAGE_BYTES

    def _add_code(self, contents_at: Mapping[Code, int]) -> dict[Code, int]:
        """Adds the code of the functions, each once, and returns the addresses."""
        addresses = {}
        for code in self._codes:
            at = self._fixed.add(b"")
            addresses[code] = self._fixed.add(code.placed(at, contents_at[code]))
        return addresses

    def _add_tables(self, codes_at: Mapping[Code, int]) -> dict[int, int]:
        """Adds the tables of symbols, versions and texts, and returns the tags of the dynamic section."""
        tags = {_DT_SONAME: self._texts.offset(self._soname)}
        symbols = bytearray(_SYMBOL_BYTES)  # the first one is empty
        for function in self._functions:
            name = self._texts.offset(function.name)
            symbols += struct.pack(_SYMBOL_FORM, name, _GLOBAL_FUNCTION, 0, 1, codes_at[function.code], 8)
        tags[_DT_HASH] = self._fixed.add(self._hash_table())
        tags[_DT_SYMTAB] = self._fixed.add(symbols)
        tags[_DT_SYMENT] = _SYMBOL_BYTES
        if self._versions:
            tags[_DT_VERSYM] = self._fixed.add(self._symbol_versions())
            tags[_DT_VERDEF] = self._fixed.add(self._version_definitions())
            tags[_DT_VERDEFNUM] = len(self._versions) + 1
        tags[_DT_STRTAB] = self._fixed.add(self._texts.content)  # last, as each table adds texts
        tags[_DT_STRSZ] = len(self._texts.content)
        return tags

    def _hash_table(self) -> bytes:
        """Returns a table with one bucket: a chain of all symbols, each with the next one."""
        num_symbols = len(self._functions) + 1
        chain = [*range(2, num_symbols), 0] if self._functions else []
        first = 1 if self._functions else 0
        values = [1, num_symbols, first, 0, *chain]  # buckets, symbols, the bucket, and that of the empty symbol
        return struct.pack(f"<{len(values)}I", *values)

    def _symbol_versions(self) -> bytes:
        """Returns the number of each symbol's version: 1 for none, and from 2 on those of the definitions."""
        numbers = [0]
        for function in self._functions:
            numbers.append(2 + self._versions.index(function.version) if function.version else 1)
        return struct.pack(f"<{len(numbers)}H", *numbers)

    def _version_definitions(self) -> bytes:
        """Returns the definitions: of the library itself, and of each version."""
        names = [self._soname, *self._versions]
        definitions = bytearray()
        for number, name in enumerate(names, start=1):
            is_library = number == 1
            step = 0 if number == len(names) else 28
            definitions += struct.pack("<HHHHIII", 1, int(is_library), number, 1, _elf_hash(name), 20, step)
            definitions += struct.pack("<II", self._texts.offset(name), 0)
        return bytes(definitions)

    def _file_header(self) -> bytes:
        shared_object, x86_64, version = 3, 62, 1
        form = "<HHIQQQIHHHHHH"
        sizes = (_HEADER_BYTES, _PROGRAM_HEADER_BYTES, _NUM_PROGRAM_HEADERS, 64, 0, 0)
        fields = struct.pack(form, shared_object, x86_64, version, 0, _HEADER_BYTES, 0, 0, *sizes)
        return (_MAGIC + b"\x01").ljust(16, b"\0") + fields


def _program_header(kind: int, flags: int, start: int, size: int) -> bytes:
    """Returns the entry of a segment that is loaded where it is in the file."""
    alignment = _PAGE_BYTES if kind == _PT_LOAD else 8
    return struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, size, alignment)


@functools.cache
def _elf_hash(name: str) -> int:
    """Returns the hash of a name, as the specification defines it."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value
