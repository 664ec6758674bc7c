"""When a capture samples the clocks of its ranks: at both ends, and between launches every few seconds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tracekern.errors import TracekernError
from tracekern.record import format as fmt
from tracekern.record.agree import SampleAgreement
from tracekern.record.segment import Segment

if TYPE_CHECKING:
    from tracekern.record.clock_samples import ClockSampler
    from tracekern.record.device import CaptureDevice
    from tracekern.record.group import Group

SAMPLE_EVERY_S = 3.0
"""Clocks are sampled before the first launch after this. What two clocks may do between two rounds grows with the
square of the time: 3 s leave a host lane within 3 us (docs/clocks.md), with room for a launch that is late."""

_log = logging.getLogger("tracekern")


class CaptureClocks:
    """Of one capture. Opening and sampling are collective."""

    def __init__(self, where: str) -> None:
        """where: the capture, for messages. Nothing is sampled before open()."""
        self._where = where
        self._sampler: ClockSampler | None = None
        self._agreement: SampleAgreement | None = None

    def open(self, device: CaptureDevice, segment: Segment, group: Group, run_id: str, one_host: bool) -> None:
        """Takes the first samples. one_host: all ranks see each other's segments."""
        from tracekern.record.clock_samples import ClockSampler

        self._sampler = ClockSampler(device, segment.append_clock_samples, device.heap_ranks, group.process_group)
        if one_host:
            names = [fmt.segment_name(run_id, rank) for rank in range(group.num_ranks)]
            segments = [segment if name == segment.name else Segment.attach(name) for name in names]
            for peer in segments:
                if peer is not segment:
                    peer.close()  # mapped it stays; an open file would outlive its removal
            self._agreement = SampleAgreement(group.rank, segments)
        self.sample()

    def sample(self) -> None:
        """One round, now."""
        if self._sampler is not None:
            if self._agreement is not None:
                self._agreement.postpone(SAMPLE_EVERY_S)
            self._sampler.sample()

    def before_launch(self) -> None:
        """Samples where it is due and all ranks agree on this launch."""
        if self._sampler is not None and self._agreement is not None and self._agreement.before_launch():
            self._sample_or_tell()

    def close(self, in_order: bool) -> bool:
        """Takes the last samples, where all ranks close their capture in order. Returns whether they do."""
        if self._agreement is not None:
            in_order = self._agreement.leave(in_order)
            self._agreement = None
        if in_order:
            self._sample_or_tell()
        return in_order

    def _sample_or_tell(self) -> None:
        """A peer that died is for the workload to find: the capture goes on with the samples it has."""
        try:
            self.sample()
        except TracekernError as error:
            _log.warning("capture %s: no more clock samples: %s", self._where, error)
            self._sampler = None
