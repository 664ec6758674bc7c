"""What nvcc built of csrc/python_api_cuda.cu."""

from typing import Any

def __getattr__(name: str) -> Any: ...
