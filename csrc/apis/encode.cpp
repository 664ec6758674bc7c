// The Perfetto encoder as tracekern/export/formats/perfetto.py calls it. Columns are checked here, once: the encoder
// trusts them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>

#include "apis/register.hpp"
#include "encode/perfetto.hpp"

namespace py = pybind11;

namespace tracekern {
namespace {

using encode::EventEncoding;
using encode::FieldEncoding;
using encode::PerfettoEncoder;

template <class T>
using Column = py::array_t<T, py::array::c_style>;

// A column of the dict `columns`, of exactly this type: a silent copy would cost memory and end before the encoder
// does.
template <class T>
Column<T> column(const py::dict& columns, const char* name, py::ssize_t count = -1) {
    const py::object value = columns[name];
    if (!py::isinstance<Column<T>>(value)) {
        throw py::type_error(std::string("column ") + name + " is not a contiguous array of its type");
    }
    auto array = py::reinterpret_borrow<Column<T>>(value);
    if (reinterpret_cast<uintptr_t>(array.data()) % alignof(T)) {
        throw py::value_error(std::string("column ") + name + " is not aligned");
    }
    if (array.ndim() != 1 || (count >= 0 && array.shape(0) != count)) {
        throw py::value_error(std::string("column ") + name + " has another length than its neighbours");
    }
    return array;
}

void check_indices(const Column<int32_t>& indices, int64_t first, size_t count, const char* what) {
    const int32_t* data = indices.data();
    for (py::ssize_t i = 0; i < indices.shape(0); ++i) {
        if (data[i] < first || data[i] >= static_cast<int64_t>(count)) {
            throw py::index_error(std::string(what) + " " + std::to_string(data[i]) + " of span or mark " +
                                  std::to_string(i) + ", there are " + std::to_string(count));
        }
    }
}

std::vector<FieldEncoding> field_encodings(const py::handle& fields) {
    std::vector<FieldEncoding> encodings;
    for (const py::handle entry : fields) {
        const auto [name_iid, shift, bits, is_signed] = entry.cast<std::tuple<uint32_t, uint32_t, uint32_t, bool>>();
        if (bits == 0 || bits > 63 || shift > 64 - bits)
            throw py::value_error("a field must have 1 to 63 bits inside 64");
        encodings.push_back({name_iid, shift, bits, is_signed});
    }
    return encodings;
}

// Python's accessor does not check the place.
py::tuple tuple_of(const py::handle& entry, size_t size) {
    auto values = entry.cast<py::tuple>();
    if (values.size() != size) throw py::value_error("a row of a table has another number of values");
    return values;
}

encode::TraceTables trace_tables(const py::dict& tables) {
    encode::TraceTables result;
    for (const auto& [uuid, sequence] : tables["tracks"].cast<std::vector<std::pair<uint64_t, uint32_t>>>()) {
        result.tracks.push_back({uuid, sequence});
    }
    for (const py::handle entry : tables["events"]) {
        const auto event = tuple_of(entry, 6);
        const int source = event[2].cast<int>();
        if (source < 0 || source > 2) throw py::value_error("name source must be 0, 1 or 2");
        result.events.push_back({event[0].cast<uint32_t>(),
                                 event[1].cast<uint32_t>(),
                                 static_cast<encode::NameSource>(source),
                                 field_encodings(event[3]),
                                 field_encodings(event[4]),
                                 event[5].cast<bool>()});
    }
    for (const py::handle entry : tables["launches"]) {
        const auto launch = tuple_of(entry, 4);
        result.launches.push_back({launch[0].cast<uint32_t>(),
                                   launch[1].cast<std::string>(),
                                   launch[2].cast<std::string>(),
                                   launch[3].cast<uint32_t>()});
    }
    result.lane_stride = tables["lane_stride"].cast<uint64_t>();
    result.time_shift = tables["time_shift"].cast<int64_t>();
    result.open_iid = tables["open_iid"].cast<uint32_t>();
    result.released_by_iid = tables["released_by_iid"].cast<uint32_t>();
    result.bytes_iid = tables["bytes_iid"].cast<uint32_t>();
    result.rate_iid = tables["rate_iid"].cast<uint32_t>();
    result.sent_iid = tables["sent_iid"].cast<uint32_t>();
    result.released_iid = tables["released_iid"].cast<uint32_t>();
    result.flow_category_iid = tables["flow_category_iid"].cast<uint32_t>();
    return result;
}

// Keeps the arrays alive for as long as the encoder reads them, whatever becomes of the dicts.
class BoundEncoder {
public:
    BoundEncoder(const py::dict& tables, const py::dict& spans, const py::dict& marks, const py::dict& flows)
        : owners_(py::make_tuple(spans.attr("copy")(), marks.attr("copy")(), flows.attr("copy")())) {
        encode::TraceTables parsed = trace_tables(tables);
        const encode::SpanColumns span_columns = check_spans(spans, parsed);
        const encode::MarkColumns mark_columns = check_marks(marks, parsed);
        const encode::FlowColumns flow_columns{
            flow_ends(flows, "signal"), flow_ends(flows, "early"), flow_ends(flows, "wait")};
        encoder_ = std::make_unique<PerfettoEncoder>(std::move(parsed), span_columns, mark_columns, flow_columns);
    }

    size_t fill(const py::buffer& buffer) {
        const py::buffer_info info = buffer.request(true);
        if (!PyBuffer_IsContiguous(info.view(), 'C')) throw py::value_error("the buffer is not contiguous");
        const size_t capacity = static_cast<size_t>(info.size * info.itemsize);
        if (capacity < encoder_->max_packet_bytes()) {
            throw py::value_error("the buffer has " + std::to_string(capacity) + " bytes, a packet may need " +
                                  std::to_string(encoder_->max_packet_bytes()));
        }
        py::gil_scoped_release release;
        return encoder_->fill(static_cast<uint8_t*>(info.ptr), capacity);
    }

    size_t max_packet_bytes() const { return encoder_->max_packet_bytes(); }
    size_t spans_written() const { return encoder_->spans_written(); }
    std::vector<uint32_t> lanes_per_track() const { return encoder_->lanes_per_track(); }

private:
    static encode::RowColumns check_rows(const py::dict& rows, py::ssize_t count, const encode::TraceTables& tables) {
        const auto track = column<int32_t>(rows, "track", count);
        const auto event = column<int32_t>(rows, "event", count);
        const auto launch = column<int32_t>(rows, "launch", count);
        check_indices(track, 0, tables.tracks.size(), "track");
        check_indices(event, 0, tables.events.size(), "event");
        check_indices(launch, -1, tables.launches.size(), "launch");
        return {track.data(), event.data(), launch.data()};
    }

    static encode::SpanColumns check_spans(const py::dict& spans, const encode::TraceTables& tables) {
        const auto start = column<int64_t>(spans, "start");
        const py::ssize_t count = start.shape(0);
        return {check_rows(spans, count, tables),
                start.data(),
                column<int64_t>(spans, "end", count).data(),
                column<int64_t>(spans, "draw_end", count).data(),
                column<uint64_t>(spans, "begin_payload", count).data(),
                column<uint64_t>(spans, "end_payload", count).data(),
                column<uint32_t>(spans, "releaser_iid", count).data(),
                column<int64_t>(spans, "group", count).data(),
                column<int64_t>(spans, "bytes", count).data(),
                static_cast<size_t>(count)};
    }

    static encode::MarkColumns check_marks(const py::dict& marks, const encode::TraceTables& tables) {
        const auto time = column<int64_t>(marks, "time");
        const py::ssize_t count = time.shape(0);
        return {check_rows(marks, count, tables),
                time.data(),
                column<uint64_t>(marks, "payload", count).data(),
                static_cast<size_t>(count)};
    }

    static encode::FlowEnds flow_ends(const py::dict& flows, const std::string& side) {
        const auto span = column<int64_t>(flows, (side + "_span").c_str());
        const auto id = column<uint64_t>(flows, (side + "_id").c_str(), span.shape(0));
        return {span.data(), id.data(), static_cast<size_t>(span.shape(0))};
    }

    py::tuple owners_;
    std::unique_ptr<PerfettoEncoder> encoder_;
};

}  // namespace

void register_encode(py::module_& module) {
    py::class_<BoundEncoder>(module, "PerfettoEncoder")
        .def(py::init<const py::dict&, const py::dict&, const py::dict&, const py::dict&>(),
             py::arg("tables"),
             py::arg("spans"),
             py::arg("marks"),
             py::arg("flows"))
        .def("fill",
             &BoundEncoder::fill,
             py::arg("buffer"),
             "Writes whole packets; returns bytes written, 0 at the end.")
        .def_property_readonly("max_packet_bytes", &BoundEncoder::max_packet_bytes)
        .def_property_readonly("spans_written", &BoundEncoder::spans_written)
        .def_property_readonly("lanes_per_track", &BoundEncoder::lanes_per_track);
}

}  // namespace tracekern
