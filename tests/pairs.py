"""Records of spans as a recorder that stores two a span would have left them: for rings made out of other captures."""

from __future__ import annotations

import numpy as np

from tracekern.dump import format as fmt


def pairs_of(spans: np.ndarray, start_ticks: int, shift: int, end_bits: list[int]) -> np.ndarray:
    """[n] WIDE_RECORD of one track's SPAN_RECORDs, all closed.

    start_ticks: of the track. end_bits: of each event of its table, the bits of its end fields.
    """
    rows: list[tuple[int, int, int]] = []
    open_ends: list[tuple[int, int, int]] = []
    start = start_ticks >> shift
    for span in spans:
        begin = start + (int(span["begin"]) - start) % (1 << 32)
        end = begin + (int(span["end"]) - int(span["begin"])) % (1 << 32)
        kind, event = int(span["word"]) & fmt.KIND_MASK, int(span["word"]) >> fmt.EVENT_SHIFT & fmt.EVENT_MASK
        payload = int(span["payload_high"]) << fmt.PAYLOAD_LOW_BITS | int(span["word"]) >> fmt.PAYLOAD_SHIFT
        of_end = payload >> fmt.PAYLOAD_BITS - end_bits[event]
        while open_ends and open_ends[-1][0] <= begin:
            rows.append(open_ends.pop())
        if kind == fmt.RecordKind.MARK:
            rows.append((begin, payload, fmt.RecordKind.MARK | event << fmt.EVENT_SHIFT))
            continue
        of_begin = payload & (1 << fmt.PAYLOAD_BITS - end_bits[event]) - 1
        rows.append((begin, of_begin, fmt.RecordKind.BEGIN | event << fmt.EVENT_SHIFT))
        open_ends.append((end, of_end, fmt.RecordKind.END | event << fmt.EVENT_SHIFT))
    rows += reversed(open_ends)
    records = np.zeros(len(rows), fmt.WIDE_RECORD)
    for row, (units, payload, kind_and_event) in enumerate(rows):
        low = (payload & (1 << fmt.PAYLOAD_LOW_BITS) - 1) << fmt.PAYLOAD_SHIFT
        records[row] = (units << shift, payload >> fmt.PAYLOAD_LOW_BITS, kind_and_event | low)
    return records


def end_bits_of(table: dict) -> list[int]:
    """The bits of the end fields of each event of a table, JSON as a dump has it."""
    return [sum(int(field.split(":")[1]) for field in event["end_fields"].split()) for event in table["events"]]
