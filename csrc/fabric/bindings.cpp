// The extension module tracekern._fabric; see tracekern/fabric.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fabric/engine.hpp"

namespace py = pybind11;
using namespace tracekern;

namespace {

std::chrono::nanoseconds to_ns(double seconds) {
    return std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9));
}
Limit to_limit(std::optional<double> seconds) {
    return seconds ? Limit(to_ns(*seconds)) : std::nullopt;
}

// Python's objects that are let go of on threads that do not hold the interpreter.
template <class Object>
std::shared_ptr<Object> keep(const Object& object) {
    return {new Object(object), [](Object* last) {
                const py::gil_scoped_acquire acquire;
                delete last;
            }};
}

// Calls a Python function from such a thread; what it raises is reported, and the result is then as if made from
// nothing.
template <class Result, class Function>
Result call_python(const Function& call) {
    const py::gil_scoped_acquire acquire;
    try {
        return call();
    } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a callback of a TransferEngine");
        return Result();
    }
}

template <class... Arguments>
std::function<void(Arguments...)> call_back(const py::function& function) {
    return [kept = keep(function)](Arguments... arguments) { call_python<void>([&] { (*kept)(arguments...); }); };
}

OnDone to_on_done(const py::object& on_done) {
    if (py::isinstance<DoneFlag>(on_done)) return on_done.cast<std::shared_ptr<DoneFlag>>();
    if (py::isinstance<DoneCounter>(on_done)) return on_done.cast<std::shared_ptr<DoneCounter>>();
    return call_back<const Result&>(py::function(on_done));
}

// Its threads end with it, and may still want the interpreter; one of them may be what let go of it.
struct EndWithoutInterpreter {
    void operator()(TransferEngine* engine) const {
        const py::gil_scoped_release release;
        if (engine->is_in_callback()) return std::thread([engine] { delete engine; }).detach();
        delete engine;
    }
};
using EngineHolder = std::unique_ptr<TransferEngine, EndWithoutInterpreter>;

EngineHolder make_engine(const std::string& library,
                         const std::vector<std::pair<std::string, std::string>>& nets,
                         int pin_cpu,
                         double connect_limit_s,
                         double transfer_limit_s,
                         const TransferEngine* first) {
    EngineOptions options;
    for (const auto& [provider, source] : nets) options.nets.push_back({provider, source, "", 0});
    options.pin_cpu = pin_cpu;
    options.connect_limit = to_ns(connect_limit_s);
    options.transfer_limit = to_ns(transfer_limit_s);
    const py::gil_scoped_release release;
    return EngineHolder(new TransferEngine(std::make_shared<FabricLibrary>(library), options, first));
}

using Pages = std::tuple<std::vector<uint64_t>, uint64_t, uint64_t>;

PageList to_page_list(const Pages& pages) {
    const auto& [indices, stride, offset] = pages;
    return {indices, stride, offset};
}

// (shards, pinned domain or None)
using Routing = std::pair<uint32_t, std::optional<uint32_t>>;
DomainGroupRouting to_routing(const Routing& routing) {
    return {routing.first, routing.second};
}

// (kind, domain)
using GroupRouting = std::pair<uint32_t, uint32_t>;
GroupTransferRouting to_routing(const GroupRouting& routing) {
    return {static_cast<GroupTransferRouting::Kind>(routing.first), routing.second};
}
void bind_names(py::module_& module) {
    py::class_<DomainAddress>(module, "DomainAddress")
        .def(py::init([](const py::bytes& bytes) { return DomainAddress{bytes}; }))
        .def_property_readonly("bytes", [](const DomainAddress& address) { return py::bytes(address.bytes); });
    using Descriptor = MemoryRegionDescriptor;
    py::class_<Descriptor>(module, "MemoryRegionDescriptor")
        .def_static("from_bytes", [](const py::bytes& bytes) { return unpack_descriptor(std::string(bytes)); })
        .def("to_bytes", [](const Descriptor& descriptor) { return py::bytes(pack(descriptor)); })
        .def_readonly("num_bytes", &Descriptor::bytes)
        .def_property_readonly("num_domains", [](const Descriptor& descriptor) { return descriptor.ways.size(); });
}

template <class Counter>
bool wait_for_count(Counter& counter, uint64_t count, double timeout_s) {
    return counter.wait(count, to_ns(timeout_s));
}

void bind_waiting(py::module_& module) {
    py::class_<LentBuffer, std::shared_ptr<LentBuffer>>(module, "LentBuffer", py::buffer_protocol())
        .def_buffer([](const LentBuffer& lent) {
            const auto bytes = lent.bytes();
            return py::buffer_info(reinterpret_cast<const uint8_t*>(bytes.data()),
                                   static_cast<py::ssize_t>(bytes.size()));
        });
    py::class_<ImmCounter, std::shared_ptr<ImmCounter>>(module, "ImmCounter")
        .def_property_readonly("imm", &ImmCounter::imm)
        .def_property_readonly("count", &ImmCounter::count)
        .def("wait", &wait_for_count<ImmCounter>, py::call_guard<py::gil_scoped_release>());
    py::class_<Result>(module, "Result")
        .def_property_readonly("outcome",
                               [](const Result& result) {
                                   constexpr const char* kNames[] = {"done", "failed", "stalled", "cancelled"};
                                   return kNames[static_cast<size_t>(result.outcome)];
                               })
        .def_readonly("why", &Result::why);
    py::class_<DoneFlag, std::shared_ptr<DoneFlag>>(module, "DoneFlag")
        .def(py::init())
        .def_property_readonly("is_done", &DoneFlag::is_done)
        .def_property_readonly("result", &DoneFlag::result)
        .def(
            "wait",
            [](DoneFlag& flag, double timeout_s) { return flag.wait(to_ns(timeout_s)); },
            py::call_guard<py::gil_scoped_release>());
    py::class_<DoneCounter, std::shared_ptr<DoneCounter>>(module, "DoneCounter")
        .def(py::init())
        .def_property_readonly("done", &DoneCounter::done)
        .def_property_readonly("errors", &DoneCounter::errors)
        .def_property_readonly("first_error", &DoneCounter::first_error)
        .def("wait", &wait_for_count<DoneCounter>, py::call_guard<py::gil_scoped_release>());
}

using Engine = TransferEngine;
using OptionalImm = std::optional<uint32_t>;

void bind_memory(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def(py::init(&make_engine),
             py::arg("library"),
             py::arg("nets"),
             py::arg("pin_cpu"),
             py::arg("connect_limit_s"),
             py::arg("transfer_limit_s"),
             py::arg("first"))
        .def_property_readonly("num_domains", &Engine::num_domains)
        .def_property_readonly("main_address", &Engine::main_address)
        .def("stop", &Engine::stop, py::call_guard<py::gil_scoped_release>())
        .def(
            "start_trace",
            [](Engine& engine, uint64_t tracks) { engine.start_trace(tracks); },
            py::arg("tracks"),
            py::call_guard<py::gil_scoped_release>())
        .def("stop_trace", &Engine::stop_trace, py::call_guard<py::gil_scoped_release>())
        .def("register_memory",
             [](Engine& engine, uint64_t at, uint64_t bytes, const py::object& owner) {
                 auto kept = keep(owner);
                 const py::gil_scoped_release release;
                 return engine.register_memory(at, bytes, std::move(kept));
             })
        .def("describe", &Engine::describe)
        .def(
            "unregister_memory",
            [](Engine& engine, uint64_t region, std::optional<double> timeout_s) {
                return engine.unregister_memory(region, to_limit(timeout_s));
            },
            py::call_guard<py::gil_scoped_release>());
}

void bind_transfers(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def("submit_write",
             [](Engine& engine,
                uint64_t src,
                uint64_t src_offset,
                uint64_t num_bytes,
                const MemoryRegionDescriptor& dst,
                uint64_t dst_offset,
                OptionalImm imm,
                const Routing& routing,
                std::optional<double> timeout_s,
                const py::object& on_done) {
                 return engine.submit_write(src,
                                            src_offset,
                                            num_bytes,
                                            dst,
                                            dst_offset,
                                            imm,
                                            to_routing(routing),
                                            to_limit(timeout_s),
                                            to_on_done(on_done));
             })
        .def("submit_paged_writes",
             [](Engine& engine,
                uint64_t src,
                const Pages& src_pages,
                const MemoryRegionDescriptor& dst,
                const Pages& dst_pages,
                uint64_t page_bytes,
                OptionalImm imm,
                const Routing& routing,
                std::optional<double> timeout_s,
                const py::object& on_done) {
                 return engine.submit_paged_writes(src,
                                                   to_page_list(src_pages),
                                                   dst,
                                                   to_page_list(dst_pages),
                                                   page_bytes,
                                                   imm,
                                                   to_routing(routing),
                                                   to_limit(timeout_s),
                                                   to_on_done(on_done));
             })
        .def("submit_imm",
             [](Engine& engine,
                const MemoryRegionDescriptor& dst,
                uint32_t imm,
                std::optional<double> timeout_s,
                const py::object& on_done) {
                 return engine.submit_imm(dst, imm, to_limit(timeout_s), to_on_done(on_done));
             })
        .def("cancel", &Engine::cancel);
}

void bind_groups(py::module_& module, py::class_<Engine, EngineHolder>& engine) {
    py::class_<PeerGroup, std::shared_ptr<PeerGroup>>(module, "PeerGroup");
    engine.def("add_peer_group", &Engine::add_peer_group)
        .def("submit_scatter",
             [](Engine& engine,
                const PeerGroup& group,
                uint64_t src,
                const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& slices,
                OptionalImm imm,
                const GroupRouting& routing,
                std::optional<double> timeout_s,
                const py::object& on_done) {
                 std::vector<ScatterSlice> made;
                 for (const auto& [bytes, from, to] : slices) made.push_back({bytes, from, to});
                 return engine.submit_scatter(
                     group, src, made, imm, to_routing(routing), to_limit(timeout_s), to_on_done(on_done));
             })
        .def("submit_barrier",
             [](Engine& engine,
                const PeerGroup& group,
                uint32_t imm,
                const GroupRouting& routing,
                std::optional<double> timeout_s,
                const py::object& on_done) {
                 return engine.submit_barrier(
                     group, imm, to_routing(routing), to_limit(timeout_s), to_on_done(on_done));
             });
}

// As a view that ends with the call. Parts of it that are kept keep the buffer.
void lend_to(const py::function& on_message, std::shared_ptr<LentBuffer> lent) {
    py::memoryview view(py::cast(std::move(lent)));
    try {
        on_message(view);
    } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a callback of a TransferEngine");
    }
    try {
        view.attr("release")();
    } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_BufferError)) throw;
    }
}

void bind_messages(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def("submit_send",
             [](Engine& engine, const DomainAddress& to, const py::bytes& payload, const py::object& on_done) {
                 engine.submit_send(to, payload, to_on_done(on_done));
             })
        .def("submit_bouncing_recvs",
             [](Engine& engine, uint64_t bytes, uint64_t count, const py::function& on_message) {
                 const OnMessage lend = [kept = keep(on_message)](std::shared_ptr<LentBuffer> lent) {
                     call_python<void>([&] { lend_to(*kept, std::move(lent)); });
                 };
                 const py::gil_scoped_release release;
                 engine.submit_bouncing_recvs(bytes, count, lend);
             })
        .def("on_peer",
             [](Engine& engine, const py::function& on_peer) {
                 auto callback = call_back<const std::string&>(on_peer);
                 const py::gil_scoped_release release;
                 engine.on_peer(callback);
             })
        .def("expect_imm_count",
             [](Engine& engine, uint32_t imm, uint64_t count, const py::function& reached) {
                 auto at_once = engine.imms().expect(imm, count, call_back<>(reached));
                 if (at_once) engine.callbacks().put(std::move(*at_once));
             })
        .def("make_imm_counter", [](Engine& engine, uint32_t imm) { return engine.imms().make_counter(imm); })
        .def("remove_imm_count", [](Engine& engine, uint32_t imm) { return engine.imms().remove(imm); })
        .def("set_imm_callback", [](Engine& engine, const py::function& callback) {
            engine.imms().set_callback(call_back<uint32_t>(callback));
        });
}

void bind_watchers(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def("watch",
             [](Engine& engine, uint64_t word, const py::object& memory, const py::function& on_change) {
                 const auto call = [kept = keep(on_change), memory = keep(memory)](uint64_t old, uint64_t now) {
                     return call_python<bool>([&] { return py::bool_((*kept)(old, now)); });
                 };
                 return engine.watch(word, call);
             })
        .def("unwatch", &Engine::unwatch, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

PYBIND11_MODULE(_fabric, module) {
    module.doc() = "tracekern's compiled part for transfers over libfabric";
    bind_names(module);
    bind_waiting(module);
    py::class_<Engine, EngineHolder> engine(module, "TransferEngine");
    bind_memory(engine);
    bind_transfers(engine);
    bind_groups(module, engine);
    bind_messages(engine);
    bind_watchers(engine);
    module.def("describe_events", &describe_events<TransferEvent>);
    // [(provider, source, fabric, bits a second or 0)] of those providers that are here.
    module.def("find_nets", [](const std::string& library, const std::vector<std::string>& providers) {
        py::list nets;
        for (const Net& net : find_nets(FabricLibrary(library), providers)) {
            nets.append(py::make_tuple(net.provider, net.source, net.fabric, net.bits_per_s));
        }
        return nets;
    });
    // Of the library, as "2.5".
    module.def("library_version", [](const std::string& library) {
        const uint32_t version = FabricLibrary(library).version();
        return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
    });
}
