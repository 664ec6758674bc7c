"""`tracekern export`: one capture as a trace or a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tracekern.cli import convert, options
from tracekern.errors import BadInput


def export(
    capture: Annotated[Path, typer.Argument(metavar="CAPTURE", help="A capture directory.")],
    output: options.OptionalOutput = None,
    otf2: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=options.output_path,
            help="Write an OTF2 archive, for Vampir, into this new directory.",
        ),
    ] = None,
    unaligned: options.Unaligned = False,
    strict: options.Strict = False,
    partial: options.Partial = False,
    window: options.Window = None,
    ranks: options.Ranks = None,
    tracks: options.TrackDetail = options.Tracks.warp,
    host: options.Host = None,
    as_json: options.Json = False,
) -> None:
    """Write one capture in another format: Perfetto, Chrome JSON, Parquet or OTF2."""
    source = convert.Source([capture], unaligned, strict, partial, window, ranks, tracks, host)
    if (output is None) == (otf2 is None):
        raise BadInput("export: wanted one of -o FILE and --otf2 DIR")
    convert.convert(source, output or otf2, as_json, "otf2" if otf2 else None)
