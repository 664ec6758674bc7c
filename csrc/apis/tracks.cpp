// The tracks of a region as tracekern/segment/pack.py has them read. Sizes are checked here, once.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <span>

#include "apis/register.hpp"
#include "trace/track_reader.hpp"

namespace py = pybind11;

namespace tracekern {
namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;

// Calls visit(track, its header, its records) for each; headers and records are the bytes of whole arrays. The header
// is a copy: memory of numpy is not aligned as headers are.
template <class Visit>
void for_tracks(const Bytes& headers, const Bytes& records, Visit visit) {
    const size_t num_tracks = static_cast<size_t>(headers.nbytes()) / sizeof(TrackHeader);
    const size_t num_records = static_cast<size_t>(records.nbytes()) / sizeof(WideRecord);
    if (num_tracks * sizeof(TrackHeader) != static_cast<size_t>(headers.nbytes()) ||
        num_records * sizeof(WideRecord) != static_cast<size_t>(records.nbytes()) ||
        (num_tracks ? num_records % num_tracks : num_records) != 0) {
        throw py::value_error("wanted whole tracks, each with as many records");
    }
    const auto* first = reinterpret_cast<const WideRecord*>(records.data());
    if (reinterpret_cast<uintptr_t>(first) % alignof(WideRecord)) throw py::value_error("wanted aligned records");
    const size_t per_track = num_tracks ? num_records / num_tracks : 0;
    for (size_t track = 0; track < num_tracks; ++track) {
        TrackHeader header;
        memcpy(&header, headers.data() + track * sizeof(TrackHeader), sizeof(TrackHeader));
        visit(track, header, std::span(first + track * per_track, per_track));
    }
}

void find_all_records(Bytes headers, const Bytes& records, bool is_reused) {
    uint8_t* bytes = headers.mutable_data();
    for_tracks(headers, records, [&](size_t track, TrackHeader& header, std::span<const WideRecord> of_track) {
        find_records(header, of_track, is_reused);
        memcpy(bytes + track * sizeof(TrackHeader), &header, sizeof(TrackHeader));
    });
}

Bytes copy_all_records(const Bytes& headers, const Bytes& records) {
    size_t total = 0;
    for_tracks(headers, records, [&](size_t, const TrackHeader& header, std::span<const WideRecord> of_track) {
        if (header.written > of_track.size()) throw py::value_error("find_records() comes first");
        total += header.written;
    });
    Bytes copied(static_cast<py::ssize_t>(total * sizeof(WideRecord)));
    auto* out = reinterpret_cast<WideRecord*>(copied.mutable_data());
    for_tracks(headers, records, [&](size_t, const TrackHeader& header, std::span<const WideRecord> of_track) {
        out = copy_records(header, of_track, out);
    });
    return copied;
}

}  // namespace

void register_tracks(py::module_& module) {
    module.def("find_records",
               &find_all_records,
               py::arg("headers").noconvert(),
               py::arg("records").noconvert(),
               py::arg("is_reused"));
    module.def("copy_records", &copy_all_records, py::arg("headers").noconvert(), py::arg("records").noconvert());
}

}  // namespace tracekern
