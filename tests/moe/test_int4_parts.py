"""Parts of the int4 experts' kernels: the sparse multiplication as PTX defines it, and the exponential."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from toolchains import program

pytestmark = pytest.mark.programs("tests/cpp/int4_parts.cpp")

VALID = (0x4, 0x8, 0x9, 0xC, 0xD, 0xE)
"""Metadata of a chunk that PTX allows: two places, the second behind the first."""


def run_part(part: str, data: bytes) -> np.ndarray:
    done = subprocess.run([program("int4_parts", "-O2"), part], input=data, capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.float32)


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Of whole numbers below 256, which bf16 holds."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint32)


@pytest.mark.parametrize("selector", [0, 1])
def test_a_sparse_multiplication_is_that_of_ptx(selector):
    """Fragments by the PTX ISA's rules for mma.sp::ordered_metadata.m16n8k32 with bf16."""
    rng = np.random.default_rng(selector)
    num_cases = 50
    data, wanted = [], []
    for _ in range(num_cases):
        kept = rng.integers(-8, 8, (16, 8, 2))
        nibbles = rng.choice(VALID, (16, 8))
        dense = rng.integers(-16, 17, (32, 8))
        sparse = np.zeros((16, 32), np.int64)
        rows = np.zeros((32, 4), np.uint32)
        metadata = rng.integers(0, 1 << 32, 32, dtype=np.uint32)  # of the lanes that are not looked at
        for group in range(8):
            for part in range(2):
                lane = 4 * group + 2 * selector + part
                halves = [sum(int(nibbles[row, 4 * part + i]) << 4 * i for i in range(4)) for row in (group, group + 8)]
                metadata[lane] = halves[0] | halves[1] << 16
        for row in range(16):
            for chunk in range(8):
                places = int(nibbles[row, chunk])
                sparse[row, 4 * chunk + (places & 3)] = kept[row, chunk, 0]
                sparse[row, 4 * chunk + (places >> 2)] = kept[row, chunk, 1]
                low, high = bfloat16_bits(kept[row, chunk])
                rows[row % 8 * 4 + chunk % 4, row // 8 + chunk // 4 * 2] = low | high << 16
        data.append(rows.tobytes() + bfloat16_bits(dense).astype(np.uint16).tobytes() + metadata.tobytes())
        product = sparse @ dense
        lanes = np.arange(32)
        group, t = lanes // 4, lanes % 4
        wanted.append([product[group + 8 * (i // 2), 2 * t + i % 2] for i in range(4)])
    got = run_part(str(selector), b"".join(data)).reshape(num_cases, 32, 4)
    assert np.array_equal(got, np.array(wanted).transpose(0, 2, 1))


def test_the_exponential_is_off_by_two_units_at_most():
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.uniform(-104, 89, 200_000), rng.normal(0, 1, 100_000), [0.0, -0.0, 1e-30]])
    x = x.astype(np.float32)
    got = run_part("exponential", x.tobytes())
    exact = np.exp(x.astype(np.float64))
    with np.errstate(over="ignore"):
        units = np.spacing(exact.astype(np.float32)).astype(np.float64)
    normal = exact < 3.4e38
    assert float((np.abs(got[normal] - exact[normal]) / units[normal]).max()) <= 2
    assert bool((got[exact > 3.41e38] == np.inf).all())


def test_the_exponential_has_its_limits():
    x = np.array([-np.inf, -1e30, -105, 90, 1e30, np.inf, np.nan], np.float32)
    got = run_part("exponential", x.tobytes())
    assert got[:6].tolist() == [0, 0, 0, np.inf, np.inf, np.inf]
    assert np.isnan(got[6])
