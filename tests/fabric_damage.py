"""Damaged names of memory and domains: those that no engine has given out, in every form that they travel in."""

from __future__ import annotations

import random
import re
import struct

NOBODY = b"99999999"
"""No process has this number."""
FIELD_BOUNDS = (0, 1, 2, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def damaged(whole: bytes, chance: random.Random, another: bytes = b"") -> bytes:
    """As whole bytes, or random ones, with a few changed, left out, doubled, or taken from another name."""
    made = bytearray(whole if chance.random() < 0.9 else chance.randbytes(chance.randrange(2 * len(whole))))
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(made) + 1)
        end = min(len(made), at + chance.choice((1, 1, 4, 8, 20)))
        made[at:end] = chance.choice(
            (b"", bytes(end - at), b"\xff" * (end - at), 2 * made[at:end], another[at:end], another[at:])
        )
        if made:
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    return bytes(made)


class PackedDescriptor:
    """A descriptor, cut into what travels: engine, secret, region, bytes, and an address, key and base a domain."""

    def __init__(self, packed: bytes) -> None:
        *self.numbers, num_ways = struct.unpack_from("<QQQQI", packed)
        at, self.addresses, self.keys = 36, list[bytes](), list[int]()
        for _ in range(num_ways):
            (size,) = struct.unpack_from("<I", packed, at)
            self.addresses.append(packed[at + 4 : at + 4 + size])
            self.keys += struct.unpack_from("<QQ", packed, at + 4 + size)
            at += 20 + size

    def pack(self) -> bytes:
        packed = struct.pack("<QQQQI", *self.numbers, len(self.addresses))
        for number, address in enumerate(self.addresses):
            key, base = self.keys[2 * number : 2 * number + 2]
            packed += struct.pack("<I", len(address)) + address + struct.pack("<QQ", key, base)
        return packed

    def change_field(self, chance: random.Random) -> None:
        """To a value at the bounds of its kind, or to one beside its own."""
        fields = chance.choice((self.numbers, self.keys))
        at = chance.randrange(len(fields))
        near = (fields[at] + chance.choice((-1, 1, 8, 4096))) % (1 << 64)
        fields[at] = chance.choice((*FIELD_BOUNDS, near))

    def change_address(self, chance: random.Random, another: bytes) -> None:
        """Half of them of an engine that nobody has met: those are sought there."""
        if chance.random() < 0.5:
            self.numbers[0] = chance.getrandbits(64)
        at = chance.randrange(len(self.addresses))
        self.addresses[at] = damaged_address(self.addresses[at], chance, another)


def damaged_address(whole: bytes, chance: random.Random, another: bytes) -> bytes:
    """Nothing is sent to another host, nor to engines of other tests: they are at 127.0.0.1 and 2, or processes."""
    made = damaged(whole, chance, another) or b"\0"
    if whole.startswith(b"fi_shm"):
        own = whole.split(b":")[1].strip(b"/")
        return re.sub(rb"(?<=^fi_shm://)\d+", lambda pid: pid[0] if pid[0] == own else NOBODY, made)
    return made[:4] + bytes([127, 0, 0, chance.randrange(3, 255)]) + made[8:] if len(made) > 8 else made


def wrong_descriptors(whole: bytes, another: bytes, count: int, seed: int) -> list[bytes]:
    """Most of them can be unpacked."""
    chance, made = random.Random(seed), list[bytes]()
    other = PackedDescriptor(another)
    while len(made) < count:
        descriptor = PackedDescriptor(whole)
        kind = chance.randrange(10)
        if kind < 5:
            descriptor.change_field(chance)
        elif kind < 8:
            descriptor.change_address(chance, other.addresses[0])
        elif kind == 8:
            descriptor.keys, descriptor.numbers = chance.choice(
                ((other.keys, descriptor.numbers), (descriptor.keys, [*other.numbers[:1], *descriptor.numbers[1:]]))
            )
        packed = damaged_numbers(descriptor.pack(), chance) if kind == 9 else descriptor.pack()
        if packed not in (whole, another):
            made.append(packed)
    return made


def damaged_numbers(packed: bytes, chance: random.Random) -> bytes:
    """Cut short, made longer, or with a bit changed outside of its addresses."""
    made = bytearray(packed)
    numbers = [*range(40), *range(len(packed) - 16, len(packed))]
    for at in chance.sample(numbers, 2):
        made[at] ^= 1 << chance.randrange(8)
    size = chance.choice((len(made), len(made), chance.randrange(len(made)), len(made) + 8))
    return bytes(made[:size].ljust(size, b"\xff"))
