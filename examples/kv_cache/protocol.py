"""The messages between decoder and prefillers, and where a request's bytes lie. Nothing that arrives is unpickled."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from tracekern import TracekernError

MAX_MESSAGE_BYTES = 8000
_MAGIC = b"KV01"
_HEAD = struct.Struct("<4sBQ")  # magic, kind, request
_REQUEST = struct.Struct("<IQIIIIHHI")  # imm, seed, layers, page_bytes, pool_pages, tail_bytes, address, memory, pages
_REQUEST_KIND, _CANCEL_KIND, _CANCELLED_KIND = range(3)
_STEP = 0x1E3779B97F4A7C15


class MalformedMessage(TracekernError):
    """Bytes that are no message of this protocol; the text is one line."""


@dataclass(frozen=True)
class Layout:
    """How pages lie in a pool: [layers][pages] of page_bytes, then a tail of tail_bytes for each page."""

    layers: int
    page_bytes: int
    pool_pages: int
    tail_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.pool_pages * (self.layers * self.page_bytes + self.tail_bytes)

    def layer_offset(self, layer: int) -> int:
        return layer * self.pool_pages * self.page_bytes

    def tail_offset(self, page: int) -> int:
        """A request's tail lies with its first page."""
        return self.layer_offset(self.layers) + page * self.tail_bytes


@dataclass(frozen=True)
class Request:
    """Asks for the cache of a prompt (here a seed), to be written to these pages."""

    request: int
    imm: int
    seed: int
    layout: Layout
    reply_to: bytes
    memory: bytes
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Cancel:
    request: int
    reply_to: bytes


@dataclass(frozen=True)
class Cancelled:
    """No write of the request is under way, and none will be submitted: after a cancel, or given up."""

    request: int


Message = Request | Cancel | Cancelled


def encode(message: Message) -> bytes:
    """Raises MalformedMessage for a request of too many pages."""
    if isinstance(message, Cancel):
        return _HEAD.pack(_MAGIC, _CANCEL_KIND, message.request) + message.reply_to
    if isinstance(message, Cancelled):
        return _HEAD.pack(_MAGIC, _CANCELLED_KIND, message.request)
    layout, sizes = message.layout, (len(message.reply_to), len(message.memory), len(message.pages))
    shape = layout.layers, layout.page_bytes, layout.pool_pages, layout.tail_bytes
    packed = _HEAD.pack(_MAGIC, _REQUEST_KIND, message.request)
    packed += _REQUEST.pack(message.imm, message.seed, *shape, *sizes)
    packed += message.reply_to + message.memory + struct.pack(f"<{len(message.pages)}I", *message.pages)
    if len(packed) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"a request of {len(message.pages)} pages takes {len(packed)} bytes; ask for fewer")
    return packed


def decode(packed: bytes) -> Message:
    """Raises MalformedMessage for what encode() never returns."""
    if len(packed) < _HEAD.size:
        raise MalformedMessage(f"a message of {len(packed)} bytes; wanted at least {_HEAD.size}")
    magic, kind, request = _HEAD.unpack_from(packed)
    if magic != _MAGIC:
        raise MalformedMessage(f"a message begins with {magic!r}; wanted {_MAGIC!r}")
    if kind == _REQUEST_KIND:
        return _decode_request(request, packed[_HEAD.size :])
    if kind == _CANCEL_KIND:
        return Cancel(request, packed[_HEAD.size :])
    if kind != _CANCELLED_KIND or len(packed) != _HEAD.size:
        raise MalformedMessage(f"a message of kind {kind} and {len(packed)} bytes; wanted kinds 0 to {_CANCELLED_KIND}")
    return Cancelled(request)


def _decode_request(request: int, body: bytes) -> Request:
    if len(body) < _REQUEST.size:
        raise MalformedMessage(f"a request of {len(body)} bytes; wanted at least {_REQUEST.size}")
    imm, seed, layers, page_bytes, pool, tail, reply_size, memory_size, count = _REQUEST.unpack_from(body)
    rest, wanted = body[_REQUEST.size :], reply_size + memory_size + 4 * count
    if len(rest) != wanted or not count:
        raise MalformedMessage(f"a request of {count} pages has {len(rest)} bytes behind its head; wanted {wanted}")
    pages = struct.unpack_from(f"<{count}I", rest, reply_size + memory_size)
    if len(set(pages)) != count or max(pages) >= pool:
        raise MalformedMessage(f"a request's pages are not different pages below {pool}")
    layout = Layout(layers, page_bytes, pool, tail)
    memory = rest[reply_size : reply_size + memory_size]
    return Request(request, imm, seed, layout, rest[:reply_size], memory, pages)


def steps(num_bytes: int) -> torch.Tensor:
    """[num_bytes / 8] int64: what each word of a page has more than the first one."""
    return torch.arange(num_bytes // 8) * _STEP


def first_word(seed: int, layer: int, page: int) -> int:
    return (seed * 0x9E3779B1 + layer * 0x85EBCA77C2B2 + page * 0xC2B2AE3D27) % (1 << 62)


def content(seed: int, layer: int, page: int, num_bytes: int) -> torch.Tensor:
    """[num_bytes] uint8 that stand there alone: each word depends on prompt, layer, page of the prompt, and place."""
    return (steps(num_bytes) + first_word(seed, layer, page)).view(torch.uint8)
