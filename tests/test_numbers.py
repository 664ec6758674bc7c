"""csrc/platform/number.h against torch: every 16-bit pattern, and floats where rounding is hard."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from toolchains import program

torch = pytest.importorskip("torch")

PATTERNS = np.arange(65536, dtype=np.uint16)


def hard_floats() -> np.ndarray:
    """Floats at, just below and just above every value of both formats and every tie between two of them; infinities,
    NaNs, subnormals, and 2 million random bit patterns."""
    halves = PATTERNS.view(np.float16).astype(np.float32).view(np.uint32)
    ties_of_half = np.arange(0, 1 << 32, 1 << 12, dtype=np.uint64).astype(np.uint32)  # includes half of 1 unit of fp16
    bfloats = PATTERNS.astype(np.uint32) << 16
    ties_of_bfloat = bfloats | 0x8000
    exact = np.concatenate([halves, ties_of_half, bfloats, ties_of_bfloat])
    subnormal_ties = (np.arange(2050, dtype=np.float64) / 2 * 2.0**-24).astype(np.float32).view(np.uint32)
    exact = np.concatenate([exact, subnormal_ties, subnormal_ties | 0x80000000])
    random = np.random.default_rng(1).integers(0, 1 << 32, 2_000_000, np.uint32)
    return np.concatenate([exact, exact - 1, exact + 1, random]).view(np.float32)


@pytest.fixture(scope="module")
def converted() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """floats, their half bits, their bfloat16 bits, floats of all halves, floats of all bfloat16."""
    floats = hard_floats()
    output = subprocess.run([program("numbers", "-O2")], input=floats.tobytes(), capture_output=True, check=True).stdout
    narrow = np.frombuffer(output, np.uint16, 2 * len(floats)).reshape(-1, 2)
    wide = np.frombuffer(output, np.float32, 2 * 65536, offset=narrow.nbytes).reshape(2, -1)
    return floats, narrow[:, 0], narrow[:, 1], wide[0], wide[1]


def as_torch(floats: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(floats.copy()).to(dtype).view(torch.uint16).numpy()


@pytest.mark.parametrize(("column", "dtype"), [(1, torch.float16), (2, torch.bfloat16)], ids=["half", "bfloat16"])
def test_rounds_like_torch(converted, column, dtype):
    floats, got = converted[0], converted[column]
    wanted = as_torch(floats, dtype)
    numbers = ~np.isnan(floats)
    wrong = numbers & (got != wanted)
    assert not wrong.any(), [(floats[i], hex(got[i]), hex(wanted[i])) for i in np.flatnonzero(wrong)[:4]]
    exponent = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}[dtype]
    magnitude = got[~numbers] & 0x7FFF
    assert (magnitude > exponent).all(), "a NaN stays a NaN"
    assert ((got[~numbers] >> 15) == (floats.view(np.uint32)[~numbers] >> 31)).all(), "with its sign"


@pytest.mark.parametrize(("column", "dtype"), [(3, torch.float16), (4, torch.bfloat16)], ids=["half", "bfloat16"])
def test_widens_like_torch(converted, column, dtype):
    got = converted[column]
    wanted = torch.from_numpy(PATTERNS.copy()).view(dtype).to(torch.float32).numpy()
    assert (np.isnan(got) == np.isnan(wanted)).all()
    numbers = ~np.isnan(wanted)
    assert (got.view(np.uint32)[numbers] == wanted.view(np.uint32)[numbers]).all()
