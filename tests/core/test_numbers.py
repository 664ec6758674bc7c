"""csrc/platform/number.h against torch: every pattern, and floats where rounding is hard."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import numpy as np
import pytest
from toolchains import program

pytestmark = pytest.mark.programs("tests/cpp/numbers.cpp")

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


@dataclass(frozen=True)
class Converted:
    floats: np.ndarray
    narrow: dict[torch.dtype, np.ndarray]
    """Bits of each float in a format."""
    wide: dict[torch.dtype, np.ndarray]
    """Floats of all patterns of a format."""


@pytest.fixture(scope="module")
def converted() -> Converted:
    floats = hard_floats()
    output = subprocess.run([program("numbers", "-O2")], input=floats.tobytes(), capture_output=True, check=True).stdout
    narrow = np.frombuffer(output, np.uint16, 3 * len(floats)).reshape(-1, 3)
    wide = np.frombuffer(output, np.float32, 2 * 65536 + 256, offset=narrow.nbytes)
    formats = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
    return Converted(
        floats,
        dict(zip(formats, narrow.T, strict=True)),
        dict(zip(formats, np.split(wide, [65536, 2 * 65536]), strict=True)),
    )


def as_torch(floats: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(floats.copy()).to(dtype).view(torch.uint16).numpy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["half", "bfloat16"])
def test_rounds_like_torch(converted, dtype):
    floats, got = converted.floats, converted.narrow[dtype]
    wanted = as_torch(floats, dtype)
    numbers = ~np.isnan(floats)
    wrong = numbers & (got != wanted)
    assert not wrong.any(), [(floats[i], hex(got[i]), hex(wanted[i])) for i in np.flatnonzero(wrong)[:4]]
    exponent = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}[dtype]
    magnitude = got[~numbers] & 0x7FFF
    assert (magnitude > exponent).all(), "a NaN stays a NaN"
    assert ((got[~numbers] >> 15) == (floats.view(np.uint32)[~numbers] >> 31)).all(), "with its sign"


def test_fp8_rounds_like_torch_and_saturates(converted):
    floats, got = converted.floats, converted.narrow[torch.float8_e4m3fn]
    clamped = torch.from_numpy(floats.copy()).clamp(-448, 448).to(torch.float8_e4m3fn)
    wanted = clamped.view(torch.uint8).numpy()
    numbers = ~np.isnan(floats)
    wrong = numbers & (got != wanted)
    assert not wrong.any(), [(floats[i], hex(got[i]), hex(wanted[i])) for i in np.flatnonzero(wrong)[:4]]
    assert (got[~numbers] == 0x7F).all(), "a NaN stays a NaN"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=["half", "bfloat16", "fp8"])
def test_widens_like_torch(converted, dtype):
    got = converted.wide[dtype]
    patterns = PATTERNS.astype(np.uint8)[:256] if len(got) == 256 else PATTERNS.copy()
    wanted = torch.from_numpy(patterns).view(dtype).to(torch.float32).numpy()
    assert (np.isnan(got) == np.isnan(wanted)).all()
    numbers = ~np.isnan(wanted)
    assert (got.view(np.uint32)[numbers] == wanted.view(np.uint32)[numbers]).all()
