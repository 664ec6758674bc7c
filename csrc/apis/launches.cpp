// What capture.launch() and capture.range() write to a segment, where no room has to be made for it: calls that keep
// the interpreter's lock from begin to end, so that no thread of Python sees half of one, and that wait for nothing.
// tracekern/segment/writer.py does all else.
#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apis/register.hpp"
#include "apis/used_regions.hpp"
#include "trace/record.h"
#include "trace/segment.h"

namespace py = pybind11;

namespace tracekern {
namespace {

// Shared with Python: SegmentWriter.host_words (tracekern/segment/writer.py).
struct HostWords {
    uint64_t num_started;     // launches so far
    uint64_t arena_backed;    // bytes of the arena, ...
    uint64_t entries_backed;  // ... launch entries ...
    uint64_t spans_backed;    // ... and spans of the host that have pages
    int64_t anchor_ns;        // what host time is ahead of CLOCK_MONOTONIC
    uint64_t is_open;         // whether calls may take the short way
};

int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// The text in UTF-8, cut to what a field of an entry holds, between characters; an empty view and false for no text.
bool cut_text(py::handle text, std::string_view& cut) {
    Py_ssize_t size = 0;
    const char* bytes = PyUnicode_Check(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
    if (bytes == nullptr) {
        PyErr_Clear();
        return false;
    }
    auto length = static_cast<size_t>(size);
    if (length >= sizeof(HostSpan::name)) {
        length = sizeof(HostSpan::name) - 1;
        while (length > 0 && (static_cast<unsigned char>(bytes[length]) & 0xc0) == 0x80) --length;
    }
    cut = {bytes, length};
    return true;
}

template <size_t kBytes>
void store_text(char (&field)[kBytes], std::string_view text) {
    std::memcpy(field, text.data(), text.size());
    std::memset(field + text.size(), 0, kBytes - text.size());
}

// What the regions of one plan have in common, and those that are reserved but have no launch yet.
struct RegionPlan {
    RegionPlan(uint64_t bytes,
               uint64_t records,
               uint64_t mirror,
               uint64_t address,
               const std::string& entry_bytes,
               std::string descriptor_bytes)
        : region_bytes(bytes),
          records_in_region(records),
          mirror_offset(mirror),
          arena_address(address),
          descriptor(std::move(descriptor_bytes)) {
        if (entry_bytes.size() != sizeof(entry)) throw py::value_error("wanted the bytes of a launch entry");
        std::memcpy(&entry, entry_bytes.data(), sizeof(entry));
    }

    uint64_t region_bytes;
    uint64_t records_in_region;
    uint64_t mirror_offset;
    uint64_t arena_address;  // where kernels write to the arena
    LaunchEntry entry;
    std::string descriptor;  // begins with the addresses of headers and records
    std::deque<UsedRegions::Region> ready;
    bool may_grow = true;  // the segment may find room for one more
};

class SegmentHost {
public:
    SegmentHost(uint64_t segment, const py::buffer& words, py::object is_locked, bool keeps_last)
        : segment_(reinterpret_cast<char*>(segment)),
          buffer_(words),
          words_(static_cast<HostWords*>(words.request(true).ptr)),
          is_locked_(std::move(is_locked)),
          keeps_last_(keeps_last) {}

    // Whether a call may write now: the capture is open, and no thread is in the middle of the long way. That holds
    // until the caller runs code of Python, such as __eq__, or returns.
    bool is_free() const {
        if (!words_->is_open) return false;
        const auto locked = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(is_locked_.ptr()));
        return locked.ptr() == Py_False;
    }

    bool has_room(const RegionPlan& plan) const {
        const SegmentHeader& header = this->header();
        const uint64_t first = plan.arena_address + header.arena_cursor, stop = first + plan.region_bytes;
        return header.arena_cursor + plan.region_bytes <= words_->arena_backed &&
               header.num_launches < words_->entries_backed &&
               first / kCarryBytes == (stop + kSegmentAlignment) / kCarryBytes;
    }

    // Gives the next region to a launch, which has_room(). Returns (launch_idx, offset, headers, records) of a Region.
    py::tuple start_new(const RegionPlan& plan, uint32_t sequence, uint32_t epoch, py::handle key, uint32_t waited_ns) {
        std::string_view text;
        if (!has_room(plan) || !cut_text(key, text)) throw py::value_error("wanted room and a text");
        const Started started = start(plan, sequence, epoch, text, waited_ns);
        return py::make_tuple(started.launch_idx, started.offset, started.headers, started.records);
    }

    struct Started {
        uint64_t launch_idx, offset, headers, records;
    };
    Started start(const RegionPlan& plan, uint32_t sequence, uint32_t epoch, std::string_view key, uint32_t waited_ns) {
        SegmentHeader& header = this->header();
        const uint64_t cursor = header.arena_cursor, in_segment = header.arena_offset + cursor;
        const uint64_t first = plan.descriptor.size(), launch_idx = header.num_launches;
        const Started started = {launch_idx,
                                 in_segment,
                                 plan.arena_address + cursor + first,
                                 plan.arena_address + cursor + plan.records_in_region};
        header.arena_cursor = cursor + plan.region_bytes;
        std::memcpy(segment_ + in_segment, plan.descriptor.data(), plan.descriptor.size());
        std::memcpy(segment_ + in_segment, &started.headers, 2 * sizeof(uint64_t));
        LaunchEntry& entry = this->entry(launch_idx);
        entry = plan.entry;
        entry.launch_idx = static_cast<uint32_t>(launch_idx);
        entry.headers_offset = in_segment + first;
        entry.records_offset = in_segment + plan.records_in_region;
        identify(entry, sequence, epoch, key, waited_ns);
        // Last: who reads the segment from outside finds no half-written entry.
        __atomic_store_n(&header.num_launches, launch_idx + 1, __ATOMIC_RELEASE);
        return started;
    }
    // The same of a region that was reserved before.
    UsedRegions::Region start_ready(RegionPlan& plan, uint32_t sequence, uint32_t epoch, std::string_view key) {
        const UsedRegions::Region region = plan.ready.front();
        plan.ready.pop_front();
        LaunchEntry& entry = this->entry(region.launch_idx);
        identify(entry, sequence, epoch, key, 0);
        __atomic_store_n(&entry.flags, plan.entry.flags, __ATOMIC_RELEASE);  // without the mark of one that is reserved
        return region;
    }

    // Gives a region to a launch of its plan: the first one, or the next one of a flight recorder.
    void start_again(uint32_t launch_idx, uint64_t offset, uint32_t sequence, uint32_t epoch, std::string_view text) {
        LaunchEntry& entry = this->entry(launch_idx);
        const uint32_t flags = entry.flags | kEntryReserved;
        if (entry.flags != flags) {
            // First, so that who packs the segment from outside never sees a half-written entry.
            __atomic_store_n(&entry.flags, flags, __ATOMIC_RELEASE);
            std::atomic_thread_fence(std::memory_order_release);
            const uint32_t one = 1u << kGenerationShift, next = (entry.generation + one) & 0xffff;
            entry.generation = next ? next : one;  // 0 always means the region's first launch
            auto& descriptor = *reinterpret_cast<LaunchDescriptor*>(segment_ + offset);
            descriptor.generation = static_cast<uint16_t>(entry.generation);
            store_text(entry.key, "");  // of an earlier launch
        }
        identify(entry, sequence, epoch, text, 0);
        __atomic_store_n(&entry.flags, flags & ~kEntryReserved, __ATOMIC_RELEASE);
    }

    // A span of this thread that began at a time of CLOCK_MONOTONIC and ends now. False: nothing was written.
    bool add_span(py::handle name, int64_t begin_ns) {
        std::string_view text;
        if (!cut_text(name, text) || !is_free()) return false;
        SegmentHeader& header = this->header();
        const uint64_t count = header.num_host_spans, capacity = header.host_capacity;
        const bool is_full = count == capacity && keeps_last_ && capacity > 0;
        if (!is_full && count >= words_->spans_backed) return false;
        static thread_local const auto thread = static_cast<int64_t>(syscall(SYS_gettid));
        const uint64_t place = is_full ? header.host_spans_lost % capacity : count;
        HostSpan& span = reinterpret_cast<HostSpan*>(segment_ + header.host_offset)[place];
        const int64_t anchor_ns = words_->anchor_ns;
        span.start_ns = begin_ns + anchor_ns;
        span.end_ns = monotonic_ns() + anchor_ns;
        span.thread = thread;
        span.reserved = 0;
        store_text(span.name, text);
        uint64_t& counter = is_full ? header.host_spans_lost : header.num_host_spans;
        __atomic_store_n(&counter, counter + 1, __ATOMIC_RELEASE);
        return true;
    }

private:
    SegmentHeader& header() const { return *reinterpret_cast<SegmentHeader*>(segment_); }
    LaunchEntry& entry(uint64_t idx) const {
        return reinterpret_cast<LaunchEntry*>(segment_ + header().launches_offset)[idx];
    }
    void identify(LaunchEntry& entry, uint32_t sequence, uint32_t epoch, std::string_view key, uint32_t waited_ns) {
        entry.sequence = sequence;
        entry.epoch = epoch;
        entry.order = static_cast<uint32_t>(words_->num_started++);
        entry.host_ns = static_cast<uint64_t>(monotonic_ns() + words_->anchor_ns);
        entry.waited_ns = waited_ns;
        if (!key.empty()) store_text(entry.key, key);
    }

    char* segment_;
    py::buffer buffer_;  // keeps the words
    HostWords* words_;
    py::object is_locked_;
    bool keeps_last_;
};

// Launches of known kernels, and how often each name was launched.
class LaunchTable {
public:
    LaunchTable(SegmentHost& host, uint64_t every) : host_(host), every_(every) {}

    size_t add_counter() {
        counts_.push_back(0);
        return counts_.size() - 1;
    }
    uint64_t count(size_t counter) { return counts_.at(counter)++; }
    void set_count(size_t counter, uint64_t value) { counts_.at(counter) = value; }

    // kernel: (name, grid, warps, stream, events, roles).
    // used: of a flight recorder, or None.
    void add(const py::tuple& kernel, py::object plan, size_t counter, uint64_t choice_base, py::object used) {
        auto* known = plan.cast<RegionPlan*>();
        auto* again = used.is_none() ? nullptr : used.cast<UsedRegions*>();
        known_[kernel] = py::int_(kernels_.size());
        kernels_.push_back({known, again, std::move(plan), std::move(used), counter, choice_base});
    }
    void clear() {
        known_.clear();
        kernels_.clear();
    }
    // Where the words of SamplingSchedule are: before a launch that is due, ranks sample their clocks. decision: 0 but
    // for the rank that decides.
    void sample_by(uint64_t due, uint64_t decision, const py::buffer& counts) {
        due_ = reinterpret_cast<const int64_t*>(due);
        decision_ = reinterpret_cast<uint64_t*>(decision);
        sampling_buffer_ = counts;
        sampling_ = static_cast<uint64_t*>(counts.request(true).ptr);
    }

    // Returns LaunchHandle.descriptor; -1: it has to go the long way, and nothing was counted.
    int64_t launch(py::handle name,
                   py::handle grid,
                   py::handle warps,
                   py::handle stream,
                   py::handle events,
                   py::handle roles,
                   py::handle epoch,
                   py::handle key,
                   bool ahead) {
        std::string_view text;
        const size_t place = find(name, grid, warps, stream, events, roles);  // may run code of Python
        if (!PyLong_CheckExact(epoch.ptr()) || !cut_text(key, text) || !host_.is_free()) return -1;
        const uint64_t number = PyLong_AsUnsignedLongLong(epoch.ptr());
        const bool is_due = due_ != nullptr && monotonic_ns() >= __atomic_load_n(due_, __ATOMIC_RELAXED);
        if (place >= kernels_.size() || is_due || PyErr_Occurred() || number >> 32) {
            PyErr_Clear();
            return -1;
        }
        const auto told = static_cast<uint32_t>(number);
        return kernels_[place].used ? launch_again(place, told, text, ahead) : launch_new(kernels_[place], told, text);
    }

private:
    struct Kernel {
        RegionPlan* plan;
        UsedRegions* used;
        py::object plan_owner, used_owner;
        size_t counter;
        uint64_t choice_base;
    };

    int64_t launch_new(const Kernel& kernel, uint32_t epoch, std::string_view key) {
        RegionPlan& plan = *kernel.plan;
        if (is_next_selected(kernel) && plan.ready.empty() && !host_.has_room(plan)) return -1;
        uint32_t sequence = 0;
        if (!count_launch(kernel, sequence)) return 0;
        return static_cast<int64_t>(kernel.choice_base + start_in_room(plan, sequence, epoch, key).offset);
    }

    // The same of a flight recorder: without room the oldest launch's region is used again.
    int64_t launch_again(size_t place, uint32_t epoch, std::string_view key, bool ahead) {
        const Kernel kernel = kernels_[place];  // what asks the stream runs code of Python
        RegionPlan& plan = *kernel.plan;
        std::optional<UsedRegions::Region> oldest;
        try {
            kernel.used->progress.before_launch(ahead);
            const bool has_room = !plan.ready.empty() || host_.has_room(plan);
            if (is_next_selected(kernel) && !has_room && !plan.may_grow) oldest = kernel.used->take_oldest();
        } catch (const py::error_already_set&) {
            return -1;  // the long way comes to it again, and says so
        }
        const bool has_room = !plan.ready.empty() || host_.has_room(plan);
        if (!host_.is_free() || (is_next_selected(kernel) && !has_room && !oldest)) {
            if (oldest) kernel.used->put_back(*oldest);
            return -1;
        }
        uint32_t sequence = 0;
        const bool is_selected = count_launch(kernel, sequence);
        if (!is_selected || has_room) {
            if (oldest) kernel.used->put_back(*oldest);
            if (!is_selected) return 0;
            oldest = start_in_room(plan, sequence, epoch, key);
        } else {
            host_.start_again(oldest->launch_idx, oldest->offset, sequence, epoch, key);
        }
        try {
            kernel.used->append(*oldest);
        } catch (const py::error_already_set&) {  // its end cannot be told: the region is not used again
        }
        return static_cast<int64_t>(kernel.choice_base + oldest->offset);
    }

    bool is_next_selected(const Kernel& kernel) const { return counts_[kernel.counter] % every_ == 0; }
    // Counts the launch; false where it is not to be recorded.
    bool count_launch(const Kernel& kernel, uint32_t& sequence) {
        const bool is_selected = is_next_selected(kernel);
        sequence = static_cast<uint32_t>(counts_[kernel.counter]++);
        if (sampling_ != nullptr) {
            ++sampling_[0];
            if (decision_ != nullptr) __atomic_store_n(decision_, sampling_[1] << 32 | sampling_[0], __ATOMIC_RELAXED);
        }
        return is_selected;
    }
    UsedRegions::Region start_in_room(RegionPlan& plan, uint32_t sequence, uint32_t epoch, std::string_view key) {
        if (!plan.ready.empty()) return host_.start_ready(plan, sequence, epoch, key);
        const auto started = host_.start(plan, sequence, epoch, key, 0);
        return {static_cast<uint32_t>(started.launch_idx), started.offset};
    }

    // The place of a known kernel; any other number of an unknown one.
    size_t find(
        py::handle name, py::handle grid, py::handle warps, py::handle stream, py::handle events, py::handle roles) {
        const auto key = py::reinterpret_steal<py::object>(
            PyTuple_Pack(6, name.ptr(), grid.ptr(), warps.ptr(), stream.ptr(), events.ptr(), roles.ptr()));
        PyObject* found = key ? PyDict_GetItemWithError(known_.ptr(), key.ptr()) : nullptr;
        if (found == nullptr) {
            PyErr_Clear();  // a dict or a list cannot be looked up
            return SIZE_MAX;
        }
        return PyLong_AsSize_t(found);
    }

    SegmentHost& host_;
    const uint64_t every_;
    std::vector<uint64_t> counts_;
    py::dict known_;
    std::deque<Kernel> kernels_;
    const int64_t* due_ = nullptr;
    uint64_t* decision_ = nullptr;
    uint64_t* sampling_ = nullptr;
    py::object sampling_buffer_;
};

void register_used_regions(py::module_& module) {
    py::class_<StreamProgress>(module, "StreamProgress")
        .def(py::init<py::object>(), py::arg("mark"))
        .def("before_launch", &StreamProgress::before_launch, py::arg("ahead"))
        .def("count", &StreamProgress::count, py::arg("spacing"))
        .def("is_through", &StreamProgress::is_through, py::arg("launch"));
    py::class_<UsedRegions>(module, "UsedRegions")
        .def(py::init<StreamProgress&>(), py::keep_alive<1, 2>(), py::arg("progress"))
        .def("append",
             [](UsedRegions& used, uint32_t launch_idx, uint64_t offset) { used.append({launch_idx, offset}); })
        .def("take_oldest", [](UsedRegions& used) -> py::object {
            const auto oldest = used.take_oldest();
            return oldest ? py::object(py::make_tuple(oldest->launch_idx, oldest->offset)) : py::none();
        });
}

}  // namespace

void register_launches(py::module_& module) {
    register_used_regions(module);
    py::class_<RegionPlan>(module, "RegionPlan")
        .def(py::init<uint64_t, uint64_t, uint64_t, uint64_t, std::string, std::string>(),
             py::arg("region_bytes"),
             py::arg("records_in_region"),
             py::arg("mirror_offset"),
             py::arg("arena_address"),
             py::arg("entry"),
             py::arg("descriptor"))
        .def_readonly("region_bytes", &RegionPlan::region_bytes)
        .def_readonly("mirror_offset", &RegionPlan::mirror_offset)
        .def("add_ready",
             [](RegionPlan& plan, uint32_t launch_idx, uint64_t offset) { plan.ready.push_back({launch_idx, offset}); })
        .def_readwrite("may_grow", &RegionPlan::may_grow)
        .def_property_readonly("num_ready", [](const RegionPlan& plan) { return plan.ready.size(); });
    py::class_<SegmentHost>(module, "SegmentHost")
        .def(py::init<uint64_t, py::buffer, py::object, bool>(),
             py::arg("segment"),
             py::arg("words"),
             py::arg("is_locked"),
             py::arg("keeps_last"))
        .def("has_room", &SegmentHost::has_room)
        .def("start_new", &SegmentHost::start_new)
        .def("start_ready",
             [](SegmentHost& host, RegionPlan& plan, uint32_t sequence, uint32_t epoch, py::handle key) {
                 std::string_view text;
                 if (plan.ready.empty() || !cut_text(key, text)) throw py::value_error("wanted a region and a text");
                 const auto region = host.start_ready(plan, sequence, epoch, text);
                 return py::make_tuple(region.launch_idx, region.offset);
             })
        .def("start_again",
             [](SegmentHost& host, uint32_t idx, uint64_t offset, uint32_t sequence, uint32_t epoch, py::handle key) {
                 std::string_view text;
                 if (!cut_text(key, text)) throw py::value_error("wanted a text");
                 host.start_again(idx, offset, sequence, epoch, text);
             })
        .def("add_span", &SegmentHost::add_span);
    py::class_<LaunchTable>(module, "LaunchTable")
        .def(py::init<SegmentHost&, uint64_t>(), py::keep_alive<1, 2>(), py::arg("host"), py::arg("every"))
        .def("add_counter", &LaunchTable::add_counter)
        .def("count", &LaunchTable::count)
        .def("set_count", &LaunchTable::set_count)
        .def("add",
             &LaunchTable::add,
             py::arg("kernel"),
             py::arg("plan"),
             py::arg("counter"),
             py::arg("choice_base"),
             py::arg("used") = py::none())
        .def("clear", &LaunchTable::clear)
        .def("sample_by", &LaunchTable::sample_by)
        .def("launch", &LaunchTable::launch);
}

}  // namespace tracekern
