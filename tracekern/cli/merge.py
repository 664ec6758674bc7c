"""`tracekern merge`: the captures of all nodes and ranks as one trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracekern.cli import convert, options


def merge(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE", help="Capture directories, or single dumps.")],
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
    """Put the captures of all ranks on one time axis and write one trace."""
    source = convert.Source(captures, unaligned, strict, partial, window, ranks, tracks, host)
    convert.convert(source, output, as_json)
