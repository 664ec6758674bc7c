// The extension module tracekern._fabric; see tracekern/fabric.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <set>

#include "fabric/engine.hpp"
#include "fabric/rank_proxy.hpp"

namespace py = pybind11;
using namespace tracekern;

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;  // as fabric/rule.hpp wants it

// At most some 30 years: what is added to a time stays one.
std::chrono::nanoseconds to_ns(double seconds) {
    if (!(seconds > 0)) return {};
    return std::chrono::nanoseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1e9));
}
Limit to_limit(std::optional<double> seconds) {
    return seconds ? Limit(to_ns(*seconds)) : std::nullopt;
}
// Peers write some of it.
py::str to_text(const std::string& bytes) {
    return py::reinterpret_steal<py::str>(
        PyUnicode_DecodeUTF8(bytes.data(), static_cast<py::ssize_t>(bytes.size()), "backslashreplace"));
}

std::shared_ptr<void> enter_interpreter() {
    return std::make_shared<py::gil_scoped_acquire>();
}

// What a callback raises is reported, and its result is then as if made from nothing.
template <class Result, class Function>
Result call_python(const Function& call) {
    try {
        return call();
    } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a callback of a TransferEngine");
        return Result();
    }
}

// A Python function for the callback thread to call.
template <class... Arguments>
std::function<void(Arguments...)> call_back(TransferEngine& engine, const py::function& function) {
    return [kept = engine.callbacks().keep(function)](Arguments... arguments) {
        call_python<void>([&] { (*kept)(arguments...); });
    };
}

// Its threads end with it, and may still want the interpreter.
struct EndWithoutInterpreter {
    template <class Ended>
    void operator()(Ended* ended) const {
        const py::gil_scoped_release release;
        delete ended;
    }
};
using EngineHolder = std::unique_ptr<TransferEngine, EndWithoutInterpreter>;
using ProxyHolder = std::unique_ptr<RankProxy, EndWithoutInterpreter>;

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
    return EngineHolder(
        new TransferEngine(std::make_shared<FabricLibrary>(library), options, enter_interpreter, first));
}

// (indices, stride, offset)
using Pages = std::tuple<std::vector<uint64_t>, uint64_t, uint64_t>;
// (shards, pinned domain or None)
using Routing = std::pair<uint32_t, std::optional<uint32_t>>;
// (kind, domain)
using GroupRouting = std::pair<uint32_t, uint32_t>;
// (bytes, source offset, destination offset) each
using Slices = std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>;

// What the engine takes for an argument of Python.
template <class T>
const T& to_engine(TransferEngine&, const T& given) {
    return given;
}
Limit to_engine(TransferEngine&, const std::optional<double>& seconds) {
    return to_limit(seconds);
}
PageList to_engine(TransferEngine&, const Pages& pages) {
    const auto& [indices, stride, offset] = pages;
    return {indices, stride, offset};
}
DomainGroupRouting to_engine(TransferEngine&, const Routing& routing) {
    return {routing.first, routing.second};
}
GroupTransferRouting to_engine(TransferEngine&, const GroupRouting& routing) {
    return {static_cast<GroupTransferRouting::Kind>(routing.first), routing.second};
}
std::vector<ScatterSlice> to_engine(TransferEngine&, const Slices& slices) {
    std::vector<ScatterSlice> made;
    for (const auto& [bytes, from, to] : slices) made.push_back({bytes, from, to});
    return made;
}
OnDone to_engine(TransferEngine& engine, const py::object& on_done) {
    if (py::isinstance<DoneFlag>(on_done)) return on_done.cast<std::shared_ptr<DoneFlag>>();
    if (py::isinstance<DoneCounter>(on_done)) return on_done.cast<std::shared_ptr<DoneCounter>>();
    return call_back<const Result&>(engine, py::function(on_done));
}

// A submit_x() as Python calls it, with arguments of these types.
template <class... Given, class Submit>
auto submitting(Submit submit) {
    return [submit](TransferEngine& engine, const Given&... given) {
        std::tuple<decltype(to_engine(engine, given))...> taken{to_engine(engine, given)...};
        const py::gil_scoped_release release;
        return std::apply([&](auto&&... each) { return (engine.*submit)(std::forward<decltype(each)>(each)...); },
                          std::move(taken));
    };
}

void bind_names(py::module_& module) {
    using Descriptor = MemoryRegionDescriptor;
    py::class_<Descriptor>(module, "MemoryRegionDescriptor")
        .def_static("from_bytes", [](const py::bytes& bytes) { return unpack_descriptor(std::string(bytes)); })
        .def("to_bytes", [](const Descriptor& descriptor) { return py::bytes(pack(descriptor)); })
        .def_readonly("num_bytes", &Descriptor::bytes)
        .def_property_readonly("num_domains", [](const Descriptor& descriptor) { return descriptor.ways.size(); });
}

// wait(limit) in pieces, so that a signal's handler runs meanwhile.
template <class Wait>
bool wait_for(double timeout_s, const Wait& wait) {
    constexpr std::chrono::nanoseconds kPiece = std::chrono::milliseconds(100);
    const auto until = std::chrono::steady_clock::now() + to_ns(timeout_s);
    while (true) {
        const std::chrono::nanoseconds left = until - std::chrono::steady_clock::now();
        {
            const py::gil_scoped_release release;
            if (wait(std::clamp(left, std::chrono::nanoseconds(), kPiece))) return true;
        }
        if (left <= kPiece) return false;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}
template <class Counter>
bool wait_for_count(Counter& counter, uint64_t count, double timeout_s) {
    return wait_for(timeout_s, [&](std::chrono::nanoseconds limit) { return counter.wait(count, limit); });
}

// A message that Python reads; its buffer goes back without the interpreter.
struct Lent {
    std::shared_ptr<LentBuffer> buffer;

    explicit Lent(std::shared_ptr<LentBuffer> lent) : buffer(std::move(lent)) {}
    Lent(Lent&&) = default;
    ~Lent() {
        const py::gil_scoped_release release;
        buffer.reset();
    }
};

void bind_waiting(py::module_& module) {
    py::class_<Lent>(module, "LentBuffer", py::buffer_protocol()).def_buffer([](const Lent& lent) {
        const auto bytes = lent.buffer->bytes();
        return py::buffer_info(reinterpret_cast<const uint8_t*>(bytes.data()), static_cast<py::ssize_t>(bytes.size()));
    });
    py::class_<ImmCounter, std::shared_ptr<ImmCounter>>(module, "ImmCounter")
        .def_property_readonly("imm", &ImmCounter::imm)
        .def_property_readonly("count", &ImmCounter::count)
        .def("wait", &wait_for_count<ImmCounter>);
    py::class_<Result>(module, "Result")
        .def_property_readonly("outcome",
                               [](const Result& result) {
                                   constexpr const char* kNames[] = {"done", "failed", "stalled", "cancelled"};
                                   return kNames[static_cast<size_t>(result.outcome)];
                               })
        .def_property_readonly("why", [](const Result& result) { return to_text(result.why); });
    py::class_<DoneFlag, std::shared_ptr<DoneFlag>>(module, "DoneFlag")
        .def(py::init())
        .def_property_readonly("is_done", &DoneFlag::is_done)
        .def_property_readonly("result", &DoneFlag::result)
        .def("wait", [](DoneFlag& flag, double timeout_s) {
            return wait_for(timeout_s, [&](std::chrono::nanoseconds limit) { return flag.wait(limit); });
        });
    py::class_<DoneCounter, std::shared_ptr<DoneCounter>>(module, "DoneCounter")
        .def(py::init())
        .def_property_readonly("done", &DoneCounter::done)
        .def_property_readonly("errors", &DoneCounter::errors)
        .def_property_readonly("first_error", py::cpp_function(&DoneCounter::first_error, Unlocked()))
        .def("wait", &wait_for_count<DoneCounter>);
}

using Engine = TransferEngine;
using OptionalImm = std::optional<uint32_t>;
using Seconds = std::optional<double>;

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
        .def_property_readonly("main_address",
                               [](const Engine& engine) { return py::bytes(pack(engine.main_address())); })
        .def(
            "stop",
            [](Engine& engine, std::optional<double> timeout_s) { return engine.stop(to_limit(timeout_s)); },
            py::arg("timeout_s") = std::nullopt,
            Unlocked())
        .def(
            "start_trace",
            [](Engine& engine, uint64_t tracks) { engine.start_trace(tracks); },
            py::arg("tracks"),
            Unlocked())
        .def("stop_trace", &Engine::stop_trace, Unlocked())
        .def("register_memory",
             [](Engine& engine, uint64_t at, uint64_t bytes, const py::object& owner) {
                 auto kept = engine.callbacks().keep(owner);
                 const py::gil_scoped_release release;
                 return engine.register_memory(at, bytes, std::move(kept));
             })
        .def("describe", &Engine::describe, Unlocked())
        .def(
            "unregister_memory",
            [](Engine& engine, uint64_t region, std::optional<double> timeout_s) {
                return engine.unregister_memory(region, to_limit(timeout_s));
            },
            Unlocked());
}

void bind_transfers(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def("submit_write",
             submitting<uint64_t,
                        uint64_t,
                        uint64_t,
                        MemoryRegionDescriptor,
                        uint64_t,
                        OptionalImm,
                        Routing,
                        Seconds,
                        py::object>(&Engine::submit_write))
        .def("submit_paged_writes",
             submitting<uint64_t,
                        Pages,
                        MemoryRegionDescriptor,
                        Pages,
                        uint64_t,
                        OptionalImm,
                        Routing,
                        Seconds,
                        py::object>(&Engine::submit_paged_writes))
        .def("cancel", &Engine::cancel, Unlocked());
}

void bind_groups(py::module_& module, py::class_<Engine, EngineHolder>& engine) {
    py::class_<PeerGroup, std::shared_ptr<PeerGroup>>(module, "PeerGroup");
    engine.def("add_peer_group", &Engine::add_peer_group, Unlocked())
        .def("submit_imm", submitting<MemoryRegionDescriptor, uint32_t, Seconds, py::object>(&Engine::submit_imm))
        .def("submit_scatter",
             submitting<PeerGroup, uint64_t, Slices, OptionalImm, GroupRouting, Seconds, py::object>(
                 &Engine::submit_scatter))
        .def("submit_barrier",
             submitting<PeerGroup, uint32_t, GroupRouting, Seconds, py::object>(&Engine::submit_barrier));
}

// As a view that ends with the call. Parts of it that are kept keep the buffer.
void lend_to(const py::function& on_message, std::shared_ptr<LentBuffer> lent) {
    py::memoryview view(py::cast(Lent(std::move(lent))));
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
             [](Engine& engine, const std::string& to, std::string payload, const py::object& on_done) {
                 OnDone told = to_engine(engine, on_done);
                 const py::gil_scoped_release release;
                 engine.submit_send(unpack_address(to), std::move(payload), std::move(told));
             })
        .def("submit_bouncing_recvs",
             [](Engine& engine, uint64_t bytes, uint64_t count, const py::function& on_message) {
                 OnMessage lend = [kept = engine.callbacks().keep(on_message)](std::shared_ptr<LentBuffer> lent) {
                     call_python<void>([&] { lend_to(*kept, std::move(lent)); });
                 };
                 const py::gil_scoped_release release;
                 engine.submit_bouncing_recvs(bytes, count, std::move(lend));
             })
        .def("on_peer",
             [](Engine& engine, const py::function& on_peer) {
                 OnPeer told = [kept = engine.callbacks().keep(on_peer)](const std::string& what) {
                     call_python<void>([&] { (*kept)(to_text(what)); });
                 };
                 const py::gil_scoped_release release;
                 engine.on_peer(std::move(told));
             })
        .def("expect_imm_count",
             [](Engine& engine, uint32_t imm, uint64_t count, const py::function& reached) {
                 auto called = call_back<>(engine, reached);
                 const py::gil_scoped_release release;
                 auto at_once = engine.imms().expect(imm, count, std::move(called));
                 if (at_once) engine.callbacks().put(std::move(*at_once));
             })
        .def(
            "make_imm_counter",
            [](Engine& engine, uint32_t imm, std::set<std::string> senders) {
                return engine.imms().make_counter(imm, std::move(senders));
            },
            Unlocked())
        .def(
            "describe_senders",
            [](Engine& engine, uint32_t imm) { return engine.imms().describe_senders(imm); },
            Unlocked())
        .def(
            "remove_imm_count", [](Engine& engine, uint32_t imm) { return engine.imms().remove(imm); }, Unlocked())
        .def("set_imm_callback", [](Engine& engine, const py::function& callback) {
            auto called = call_back<uint32_t>(engine, callback);
            const py::gil_scoped_release release;
            engine.imms().set_callback(std::move(called));
        });
}

void bind_watchers(py::class_<Engine, EngineHolder>& engine) {
    engine
        .def("watch",
             [](Engine& engine, uint64_t word, const py::object& memory, const py::function& on_change) {
                 ScalarWatchers::OnChange call = [kept = engine.callbacks().keep(on_change),
                                                  memory = engine.callbacks().keep(memory)](uint64_t old,
                                                                                            uint64_t now) {
                     const py::gil_scoped_acquire acquire;
                     return call_python<bool>([&] { return py::bool_((*kept)(old, now)); });
                 };
                 const py::gil_scoped_release release;
                 return engine.watch(word, std::move(call));
             })
        .def("unwatch", &Engine::unwatch, Unlocked());
}

ProxyHolder make_proxy(const std::string& library,
                       const std::string& provider,
                       const std::string& source,
                       uint64_t comm_args,
                       uint64_t far_bytes,
                       const py::object&) {
    const py::gil_scoped_release release;
    const auto& comm = *reinterpret_cast<const CommArgs*>(comm_args);
    return ProxyHolder(new RankProxy(
        std::make_shared<FabricLibrary>(library), Net{provider, source, "", 0}, comm, RankProxyOptions{far_bytes}));
}

void bind_proxy(py::module_& module) {
    const auto meet =
        [](RankProxy& proxy, uint32_t rank, const py::bytes& domain, uint64_t key, uint64_t base, uint64_t number) {
            proxy.proxy().meet(rank, {{domain}, key, base, number});
        };
    const auto start_trace = [](RankProxy& proxy, uint64_t tracks) {
        proxy.start_trace(TraceChoice(tracks).descriptor());
    };
    py::class_<RankProxy, ProxyHolder>(module, "RankProxy")
        // owner: of comm_args and of the heaps that they name.
        .def(py::init(&make_proxy),
             py::keep_alive<1, 7>(),
             py::arg("library"),
             py::arg("provider"),
             py::arg("source"),
             py::arg("comm_args"),
             py::arg("far_bytes"),
             py::arg("owner"))
        // (domain, key, base, number), for meet() at others.
        .def_property_readonly("address",
                               [](RankProxy& proxy) {
                                   const ProxyAddress address = proxy.proxy().address();
                                   return py::make_tuple(
                                       py::bytes(address.domain.bytes), address.key, address.base, address.number);
                               })
        .def_property_readonly("tells_sources", [](RankProxy& proxy) { return proxy.proxy().tells_sources(); })
        .def_property_readonly("max_bytes", [](RankProxy& proxy) { return proxy.proxy().max_bytes(); })
        .def_property_readonly("ring", [](RankProxy& proxy) { return reinterpret_cast<uint64_t>(&proxy.ring()); })
        .def_property_readonly("num_bytes", &RankProxy::num_bytes)
        .def_property_readonly("far_heap",
                               [](const RankProxy& proxy) { return reinterpret_cast<uint64_t>(proxy.far_heap()); })
        .def_property_readonly("error", &RankProxy::error)
        .def("meet", meet)
        .def("knows_peers", &RankProxy::knows_peers, Unlocked())
        .def("start", &RankProxy::start)
        .def("leave", &RankProxy::leave, Unlocked())
        .def("start_trace", start_trace, Unlocked())
        .def("stop_trace", &RankProxy::stop_trace, Unlocked())
        .def("set_late", [](RankProxy& proxy, int64_t us) { proxy.set_late(std::chrono::microseconds(us)); })
        // inbox: a capsule of an Inbox, or None.
        .def(
            "reset",
            [](RankProxy& proxy, const py::object& inbox) {
                Inbox taken;
                if (!inbox.is_none()) taken = *py::capsule(inbox).get_pointer<Inbox>();
                const py::gil_scoped_release release;
                proxy.reset(std::move(taken));
            },
            py::arg("inbox"));
}

}  // namespace

PYBIND11_MODULE(_fabric, module) {
    module.doc() = "tracekern's compiled part for transfers over libfabric";
#ifdef TRACEKERN_CHECKED
    rule::holds_interpreter = [] { return Py_IsInitialized() && PyGILState_Check() == 1; };
#endif
    bind_names(module);
    bind_waiting(module);
    py::class_<Engine, EngineHolder> engine(module, "TransferEngine");
    bind_memory(engine);
    bind_transfers(engine);
    bind_groups(module, engine);
    bind_messages(engine);
    bind_watchers(engine);
    bind_proxy(module);
    // Whether no thread is left that calls or ends what is Python's; waits for it for so long.
    module.def(
        "have_callbacks_ended",
        [](double timeout_s) { return UserThread::have_all_ended(to_ns(timeout_s)); },
        Unlocked());
    module.def("describe_events", &describe_events<TransferEvent>);
    module.attr("proxy_tracks") = py::make_tuple(kProxyTrackNames[0], kProxyTrackNames[1]);
    module.def("anchor_host_time",
               [](int64_t anchor_ns) { host_anchor_ns.store(anchor_ns, std::memory_order_relaxed); });
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
