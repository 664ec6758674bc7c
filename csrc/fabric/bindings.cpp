// The extension module tracekern._fabric; see tracekern/fabric.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "fabric/engine.hpp"

namespace py = pybind11;
using namespace tracekern;

namespace {

// A Python function that is called, and let go of, on threads that do not hold the interpreter.
template <class... Arguments>
std::function<void(Arguments...)> call_back(const py::function& function) {
    const std::shared_ptr<py::function> kept(new py::function(function), [](py::function* last) {
        const py::gil_scoped_acquire acquire;
        delete last;
    });
    return [kept](Arguments... arguments) {
        const py::gil_scoped_acquire acquire;
        try {
            (*kept)(arguments...);
        } catch (py::error_already_set& error) {
            error.discard_as_unraisable("a callback of a TransferEngine");
        }
    };
}

// Its threads end with it, and may still want the interpreter.
struct EndWithoutInterpreter {
    void operator()(TransferEngine* engine) const {
        const py::gil_scoped_release release;
        delete engine;
    }
};
using EngineHolder = std::unique_ptr<TransferEngine, EndWithoutInterpreter>;

EngineHolder make_engine(const std::string& library,
                         const std::vector<std::pair<std::string, std::string>>& nets,
                         int pin_cpu,
                         double connect_limit_s) {
    EngineOptions options;
    for (const auto& [provider, source] : nets) options.nets.push_back({provider, source, "", 0});
    options.pin_cpu = pin_cpu;
    options.connect_limit = std::chrono::nanoseconds(static_cast<int64_t>(connect_limit_s * 1e9));
    const py::gil_scoped_release release;
    return EngineHolder(new TransferEngine(std::make_shared<FabricLibrary>(library), options));
}

PageList page_list(const std::vector<uint64_t>& indices, uint64_t stride, uint64_t offset) {
    return {indices, stride, offset};
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
    py::class_<ImmCounter, std::shared_ptr<ImmCounter>>(module, "ImmCounter")
        .def_property_readonly("imm", &ImmCounter::imm)
        .def_property_readonly("count", &ImmCounter::count)
        .def(
            "wait",
            [](ImmCounter& counter, uint64_t count, double timeout_s) {
                const auto limit = std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9));
                return counter.wait(count, limit);
            },
            py::arg("count"),
            py::arg("timeout_s"),
            py::call_guard<py::gil_scoped_release>());
}

using Engine = TransferEngine;
using OptionalImm = std::optional<uint32_t>;

void bind_memory(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def(
            py::init(&make_engine), py::arg("library"), py::arg("nets"), py::arg("pin_cpu"), py::arg("connect_limit_s"))
        .def_property_readonly("num_domains", &Engine::num_domains)
        .def_property_readonly("main_address", &Engine::main_address)
        .def("stop", &Engine::stop, py::call_guard<py::gil_scoped_release>())
        .def(
            "start_trace",
            [](Engine& engine, uint64_t tracks) { engine.start_trace(tracks); },
            py::arg("tracks"),
            py::call_guard<py::gil_scoped_release>())
        .def("stop_trace", &Engine::stop_trace, py::call_guard<py::gil_scoped_release>())
        .def("register_memory", &Engine::register_memory, py::call_guard<py::gil_scoped_release>())
        .def("describe", &Engine::describe)
        .def("unregister_memory", &Engine::unregister_memory, py::call_guard<py::gil_scoped_release>());
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
                uint32_t num_shards,
                const py::function& on_done) {
                 engine.submit_write(src,
                                     src_offset,
                                     num_bytes,
                                     dst,
                                     dst_offset,
                                     imm,
                                     num_shards,
                                     call_back<const std::string&>(on_done));
             })
        .def("submit_paged_writes",
             [](Engine& engine,
                uint64_t src,
                const std::tuple<std::vector<uint64_t>, uint64_t, uint64_t>& src_pages,
                const MemoryRegionDescriptor& dst,
                const std::tuple<std::vector<uint64_t>, uint64_t, uint64_t>& dst_pages,
                uint64_t page_bytes,
                OptionalImm imm,
                const py::function& on_done) {
                 engine.submit_paged_writes(src,
                                            std::apply(page_list, src_pages),
                                            dst,
                                            std::apply(page_list, dst_pages),
                                            page_bytes,
                                            imm,
                                            call_back<const std::string&>(on_done));
             })
        .def("submit_imm",
             [](Engine& engine, const MemoryRegionDescriptor& dst, uint32_t imm, const py::function& on_done) {
                 engine.submit_imm(dst, imm, call_back<const std::string&>(on_done));
             });
}

void bind_messages(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def("submit_send",
             [](Engine& engine, const DomainAddress& to, const py::bytes& payload, const py::function& on_done) {
                 engine.submit_send(to, payload, call_back<const std::string&>(on_done));
             })
        .def("on_message",
             [](Engine& engine, const py::function& on_message) {
                 auto callback = call_back<py::bytes>(on_message);
                 const py::gil_scoped_release release;
                 engine.on_message([callback](const std::string& text) {
                     const py::gil_scoped_acquire acquire;
                     callback(py::bytes(text));
                 });
             })
        .def("expect_imm_count",
             [](Engine& engine, uint32_t imm, uint64_t count, const py::function& reached) {
                 auto at_once = engine.imms().expect(imm, count, call_back<>(reached));
                 if (at_once) engine.callbacks().put(std::move(*at_once));
             })
        .def("shuffle", &Engine::shuffle, py::call_guard<py::gil_scoped_release>())
        .def("make_imm_counter", [](Engine& engine, uint32_t imm) { return engine.imms().make_counter(imm); })
        .def("remove_imm_count", [](Engine& engine, uint32_t imm) { return engine.imms().remove(imm); })
        .def("set_imm_callback", [](Engine& engine, const py::function& callback) {
            engine.imms().set_callback(call_back<uint32_t>(callback));
        });
}

}  // namespace

PYBIND11_MODULE(_fabric, module) {
    module.doc() = "tracekern's compiled part for transfers over libfabric";
    bind_names(module);
    py::class_<Engine, EngineHolder> engine(module, "TransferEngine");
    bind_memory(engine);
    bind_transfers(engine);
    bind_messages(engine);
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
