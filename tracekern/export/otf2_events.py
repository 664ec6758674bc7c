"""Enter and leave events of an OTF2 archive with their attributes, at the speed of the library below the package otf2.

The package makes some ten objects for an event and its attributes. Its writers take anything that has a time and knows
how to write itself: here one object does it for all events, with one attribute list, which writing empties.
"""

from __future__ import annotations

from typing import Any

from tracekern.export.drawing import argument_names
from tracekern.timeline.model import EventClass, Timeline

_ROLES = {
    EventClass.WORK: "FUNCTION",
    EventClass.WAIT: "THREAD_WAIT",
    EventClass.SIGNAL: "POINT2POINT",
    EventClass.SYNC: "BARRIER",
    EventClass.HOST: "FUNCTION",
    EventClass.LAUNCH: "KERNEL",
}
"""Names of otf2.RegionRole."""

_FieldBits = tuple[int, int, int, int]
"""(reference of the attribute, shift, mask, sign bit) of a field in a payload."""


class SpanEvents:
    """Writes the begins and ends of spans; `close` when all are written."""

    def __init__(self, otf2: Any, definitions: Any, timeline: Timeline) -> None:
        import _otf2

        self._otf2, self._library, self._definitions, self._timeline = otf2, _otf2, definitions, timeline
        self._attribute_list = _otf2.AttributeList_New()
        self._attributes: dict[str, int] = {}
        self._fields: dict[tuple[int, int], list[_FieldBits]] = {}
        self._regions: dict[tuple[EventClass, str], Any] = {}
        self._region_of: dict[tuple[int, int, int], int] = {}
        self._launch_texts: dict[int, int] = {}
        self.time = 0
        """Of the event under way: the package's writers ask for it."""
        self._region, self._write_to = 0, _otf2.EvtWriter_Enter

    def close(self) -> None:
        self._library.AttributeList_Delete(self._attribute_list)

    def enter(self, writer: Any, time: int, event: int, launch: int, payload: int, *, is_open: bool = False) -> None:
        self._add_fields(event, payload, 0)
        about = self._timeline.events[event].event_class
        if launch >= 0 and about is not EventClass.LAUNCH and about is not EventClass.HOST:
            self._add_launch(launch)
        if is_open:
            self._library.AttributeList_AddInt64(self._attribute_list, self._attribute("open"), 1)
        self.time, self._region = time, self._region_ref(event, launch, payload)
        self._write_to = self._library.EvtWriter_Enter
        writer.write(self)

    def leave(
        self, writer: Any, time: int, event: int, launch: int, payload: int, end_payload: int | None = None
    ) -> None:
        """payload: as at the begin. end_payload: None where the span did not end, or has no fields there."""
        if end_payload is not None:
            self._add_fields(event, end_payload, 1)
        self.time, self._region = time, self._region_ref(event, launch, payload)
        self._write_to = self._library.EvtWriter_Leave
        writer.write(self)

    def regions(self, event_class: EventClass) -> tuple[Any, ...]:
        """Definitions of those that were written."""
        return tuple(region for (kind, _), region in self._regions.items() if kind is event_class)

    def _write(self, writer: Any) -> None:
        """What the package's writers call."""
        self._write_to(writer.handle, self._attribute_list, self.time, self._region)

    def _add_fields(self, event: int, payload: int, which: int) -> None:
        if (event, which) not in self._fields:
            self._fields[event, which] = self._field_bits(event, which)
        for attribute, shift, mask, sign in self._fields[event, which]:
            value = (payload >> shift & mask ^ sign) - sign
            self._library.AttributeList_AddInt64(self._attribute_list, attribute, value)

    def _add_launch(self, launch: int) -> None:
        of = self._timeline.launches[launch]
        if launch not in self._launch_texts:
            self._launch_texts[launch] = self._definitions.strings.get_ref(f"{of.name} #{of.sequence}")
        text = self._launch_texts[launch]
        self._library.AttributeList_AddStringRef(self._attribute_list, self._attribute("launch", is_text=True), text)
        self._library.AttributeList_AddInt64(self._attribute_list, self._attribute("epoch"), of.epoch)

    def _field_bits(self, event: int, which: int) -> list[_FieldBits]:
        about = self._timeline.events[event]
        if about.event_class is EventClass.HOST:
            return []
        bits, shift = [], 0
        fields = (about.begin_fields, about.end_fields)[which]
        for entry, name in zip(fields, argument_names(about)[which], strict=True):
            sign = 1 << (entry.bits - 1) if entry.signed else 0
            bits.append((self._attribute(name), shift, (1 << entry.bits) - 1, sign))
            shift += entry.bits
        return bits

    def _attribute(self, name: str, *, is_text: bool = False) -> int:
        if name not in self._attributes:
            kind = self._otf2.Type.STRING if is_text else self._otf2.Type.INT64
            self._attributes[name] = self._definitions.attribute(name, type=kind)._ref
        return self._attributes[name]

    def _region_ref(self, event: int, launch: int, payload: int) -> int:
        about = self._timeline.events[event]
        key = (event, launch, payload if about.event_class is EventClass.HOST else -1)
        if key not in self._region_of:
            self._region_of[key] = self._define_region(event, launch, payload)._ref
        return self._region_of[key]

    def _define_region(self, event: int, launch: int, payload: int) -> Any:
        about = self._timeline.events[event]
        name = about.name
        if about.event_class is EventClass.HOST:
            name = self._timeline.host_names[payload] or "(no name)"
        elif about.event_class is EventClass.LAUNCH and launch >= 0:
            name = self._timeline.launches[launch].name
        key = about.event_class, name
        if key not in self._regions:
            role = getattr(self._otf2.RegionRole, _ROLES[about.event_class])
            self._regions[key] = self._definitions.region(name, region_role=role, paradigm=self._otf2.Paradigm.USER)
        return self._regions[key]
