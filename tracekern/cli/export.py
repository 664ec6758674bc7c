"""`tracekern export`: one capture as a trace or a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracekern.cli import convert, options


def export(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture directory.")],
    output: options.Output,
    unaligned: options.Unaligned = False,
    strict: options.Strict = False,
    partial: options.Partial = False,
    window: options.Window = None,
    ranks: options.Ranks = None,
    tracks: options.TrackDetail = options.Tracks.warp,
    host: options.Host = None,
    as_json: options.Json = False,
) -> None:
    """Write one capture in the format that the suffix of the output picks."""
    source = convert.Source([capture], unaligned, strict, partial, window, ranks, tracks, host)
    convert.convert(source, output, as_json)
