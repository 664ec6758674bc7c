// A libfabric in which all engines of one process meet, for sanitizers: no part of it is compiled without them.
//
// An endpoint has a thread, its NIC. It copies what was posted straight into the memory of the peer and puts a
// completion into the queue of each side. It takes its time, prefers no write to another, and sends messages in order;
// so writes overtake each other within a domain and between domains.
//
// What is closed is left alone: closing an endpoint waits for its NIC and for the NICs of others that copy into its
// memory, closing memory for the latter. Operations that had not ended are forgotten then, as most providers do.
//
// A domain named "blind" has no descriptor to wait for.
#include <rdma/fi_cm.h>
#include <rdma/fi_rma.h>
#include <sys/eventfd.h>

#include <cstdio>

#include "in_process_nic.hpp"

namespace {

using namespace in_process;

// Of tables of operations most members are left out.
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"

constexpr char kProvider[] = "in_process";
constexpr size_t kMaxWriteBytes = 5000;  // small, so that engines have to cut

// ---- endpoints ----

// The first member of each object is its fid.
template <class Object, class Fid>
Object& of(fid* object) {
    return *static_cast<Object*>(reinterpret_cast<Fid*>(object));
}
Endpoint& endpoint_of(fid* object) {
    return of<Endpoint, fid_ep>(object);
}

ssize_t ep_writemsg(fid_ep* ep, const fi_msg_rma* message, uint64_t flags) {
    auto& endpoint = endpoint_of(&ep->fid);
    return endpoint.post(endpoint.writes,
                         {{message->msg_iov, message->msg_iov + message->iov_count},
                          {message->rma_iov, message->rma_iov + message->rma_iov_count},
                          endpoint.domain->addresses->known.at(message->addr),
                          (flags & FI_REMOTE_CQ_DATA) != 0,
                          message->data,
                          message->context});
}
ssize_t ep_send(fid_ep* ep, const void* at, size_t bytes, void*, fi_addr_t to, void* context) {
    auto& endpoint = endpoint_of(&ep->fid);
    const auto& port = endpoint.domain->addresses->known.at(to);
    return endpoint.post(endpoint.sends, {{{const_cast<void*>(at), bytes}}, {}, port, false, 0, context});
}
ssize_t ep_recv(fid_ep* ep, void* at, size_t bytes, void*, fi_addr_t, void* context) {
    Domain& domain = *endpoint_of(&ep->fid).domain;
    domain.user.enter();
    const std::lock_guard lock(domain.port->receives_mutex);
    domain.port->receives.push_back({at, bytes, context});
    return 0;
}
int ep_getname(fid* object, void* address, size_t* size) {
    const uint64_t number = endpoint_of(object).domain->port->number;
    std::memcpy(address, &number, *size = sizeof(number));
    return 0;
}
int ep_bind(fid* object, fid* other, uint64_t) {
    if (other->fclass == FI_CLASS_CQ) endpoint_of(object).queue = &of<Queue, fid_cq>(other);
    return 0;
}
int ep_enable(fid* object, int, void*) {
    auto& endpoint = endpoint_of(object);
    const std::lock_guard lock(endpoint.domain->port->mutex);
    endpoint.domain->port->queue = endpoint.queue;
    endpoint.nic = std::thread([&endpoint] { endpoint.run(); });
    return 0;
}
int ep_close(fid* object) {
    auto& endpoint = endpoint_of(object);
    endpoint.domain->user.enter();
    {
        const std::lock_guard lock(endpoint.mutex);
        endpoint.is_closing = true;
        endpoint.changed.notify_one();
    }
    if (endpoint.nic.joinable()) endpoint.nic.join();
    {
        const std::lock_guard lock(endpoint.domain->port->mutex);  // after those who copy
        endpoint.domain->port->queue = nullptr;
    }
    delete &endpoint;
    return 0;
}

int open_endpoint(fid_domain* domain, fi_info*, fid_ep** made, void*) {
    static fi_ops fid_ops{.size = sizeof(fid_ops), .close = ep_close, .bind = ep_bind, .control = ep_enable};
    static fi_ops_cm names{.size = sizeof(names), .getname = ep_getname};
    static fi_ops_msg messages{.size = sizeof(messages), .recv = ep_recv, .send = ep_send};
    static fi_ops_rma writes{.size = sizeof(writes), .writemsg = ep_writemsg};
    auto* endpoint = new Endpoint();
    endpoint->fid = {FI_CLASS_EP, nullptr, &fid_ops};
    endpoint->cm = &names;
    endpoint->msg = &messages;
    endpoint->rma = &writes;
    endpoint->domain = &of<Domain, fid_domain>(&domain->fid);
    endpoint->random.seed(static_cast<uint32_t>(endpoint->domain->port->number));
    *made = endpoint;
    return 0;
}

// ---- completion queues ----

ssize_t cq_readfrom(fid_cq* cq, void* into, size_t count, fi_addr_t* sources) {
    auto& queue = of<Queue, fid_cq>(&cq->fid);
    queue.domain->user.enter();
    const std::lock_guard lock(queue.mutex);
    if (queue.entries.empty()) return -FI_EAGAIN;
    if (queue.entries.front().error) return -FI_EAVAIL;
    const auto& places = queue.domain->addresses->places;
    size_t taken = 0;
    for (; taken < count && !queue.entries.empty() && !queue.entries.front().error; ++taken) {
        const Completion& first = queue.entries.front();
        static_cast<fi_cq_data_entry*>(into)[taken] = first.entry;
        const auto place = places.find(first.source);
        sources[taken] = place == places.end() ? FI_ADDR_NOTAVAIL : place->second;
        queue.entries.pop_front();
    }
    return static_cast<ssize_t>(taken);
}
ssize_t cq_readerr(fid_cq* cq, fi_cq_err_entry* into, uint64_t) {
    auto& queue = of<Queue, fid_cq>(&cq->fid);
    const std::lock_guard lock(queue.mutex);
    into->op_context = queue.entries.front().entry.op_context;
    into->flags = queue.entries.front().entry.flags;
    into->err = queue.entries.front().error;
    queue.entries.pop_front();
    return 1;
}
int cq_descriptor(fid* object, int, void* into) {
    *static_cast<int*>(into) = of<Queue, fid_cq>(object).wakes;
    return 0;
}
int cq_trywait(fid_fabric*, fid** objects, int) {
    auto& queue = of<Queue, fid_cq>(objects[0]);
    queue.domain->user.enter();
    const std::lock_guard lock(queue.mutex);
    if (!queue.entries.empty()) return -FI_EAGAIN;
    uint64_t count = 0;
    [[maybe_unused]] const auto taken = read(queue.wakes, &count, sizeof(count));
    return 0;
}
int cq_close(fid* object) {
    auto& queue = of<Queue, fid_cq>(object);
    if (queue.wakes >= 0) close(queue.wakes);
    delete &queue;
    return 0;
}
int cq_open(fid_domain* domain, fi_cq_attr* attributes, fid_cq** made, void*) {
    static fi_ops fid_ops{.size = sizeof(fid_ops), .close = cq_close, .control = cq_descriptor};
    static fi_ops_cq ops{.size = sizeof(ops), .readfrom = cq_readfrom, .readerr = cq_readerr};
    auto& owner = of<Domain, fid_domain>(&domain->fid);
    const bool has_descriptor = attributes->wait_obj != FI_WAIT_NONE;
    if (has_descriptor && owner.is_blind) return -FI_ENOSYS;
    auto* queue = new Queue();
    queue->fid = {FI_CLASS_CQ, nullptr, &fid_ops};
    queue->ops = &ops;
    queue->domain = &owner;
    if (has_descriptor) queue->wakes = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    *made = queue;
    return 0;
}

// ---- address tables ----

uint64_t number_in(const void* address) {
    uint64_t number = 0;
    std::memcpy(&number, address, sizeof(number));
    return number;
}
int av_insert(fid_av* av, const void* address, size_t, fi_addr_t* place, uint64_t, void*) {
    auto& addresses = of<Addresses, fid_av>(&av->fid);
    const uint64_t number = number_in(address);
    const std::lock_guard lock(ports_mutex);
    if (number == 0 || number > ports.size()) return 0;
    *place = addresses.known.size();
    addresses.known.push_back(ports[number - 1]);
    addresses.places[number] = *place;
    return 1;
}
const char* av_straddr(fid_av*, const void* address, char* into, size_t* size) {
    snprintf(into, *size, "%s://%llu", kProvider, static_cast<unsigned long long>(number_in(address)));
    return into;
}
int av_close(fid* object) {
    delete &of<Addresses, fid_av>(object);
    return 0;
}
int av_open(fid_domain* domain, fi_av_attr*, fid_av** made, void*) {
    static fi_ops fid_ops{.size = sizeof(fid_ops), .close = av_close};
    static fi_ops_av ops{.size = sizeof(ops), .insert = av_insert, .straddr = av_straddr};
    auto* addresses = of<Domain, fid_domain>(&domain->fid).addresses = new Addresses();
    addresses->fid = {FI_CLASS_AV, nullptr, &fid_ops};
    addresses->ops = &ops;
    *made = addresses;
    return 0;
}

// ---- memory ----

int mr_close(fid* object) {
    auto& registration = of<Registration, fid_mr>(object);
    registration.domain->user.enter();
    {
        const std::lock_guard lock(registration.domain->port->mutex);  // after those who copy
        registration.domain->port->memories.erase(registration.key);
    }
    delete &registration;
    return 0;
}
int mr_reg(fid* object, const void* at, size_t bytes, uint64_t, uint64_t, uint64_t, uint64_t, fid_mr** made, void*) {
    static fi_ops fid_ops{.size = sizeof(fid_ops), .close = mr_close};
    auto& domain = of<Domain, fid_domain>(object);
    domain.user.enter();
    auto* registration = new Registration{};
    registration->fid = {FI_CLASS_MR, nullptr, &fid_ops};
    registration->domain = &domain;
    registration->key = domain.port->number << 32 | ++domain.num_keys;
    const std::lock_guard lock(domain.port->mutex);
    domain.port->memories[registration->key] = {static_cast<char*>(const_cast<void*>(at)), bytes};
    *made = registration;
    return 0;
}

// ---- domains and fabrics ----

template <class Object, class Fid>
int delete_object(fid* object) {
    delete &of<Object, Fid>(object);
    return 0;
}
int open_domain(fid_fabric*, fi_info* info, fid_domain** made, void*) {
    static fi_ops fid_ops{.size = sizeof(fid_ops), .close = delete_object<Domain, fid_domain>};
    static fi_ops_domain ops{.size = sizeof(ops), .av_open = av_open, .cq_open = cq_open, .endpoint = open_endpoint};
    static fi_ops_mr memory{.size = sizeof(memory), .reg = mr_reg};
    auto* domain = new Domain();
    domain->fid = {FI_CLASS_DOMAIN, nullptr, &fid_ops};
    domain->ops = &ops;
    domain->mr = &memory;
    domain->is_blind = std::strcmp(info->domain_attr->name, "blind") == 0;
    domain->port = std::make_shared<Port>();
    const std::lock_guard lock(ports_mutex);
    ports.push_back(domain->port);
    domain->port->number = ports.size();
    *made = domain;
    return 0;
}

struct Fabric : fid_fabric {};

template <class Part>
Part* make_part() {
    return static_cast<Part*>(calloc(1, sizeof(Part)));
}
char* copy_text(const char* text) {
    return strdup(text ? text : "");
}

}  // namespace

extern "C" {
int fi_fabric(fi_fabric_attr*, fid_fabric** made, void*) {
    static fi_ops fid_ops{.size = sizeof(fid_ops), .close = delete_object<Fabric, fid_fabric>};
    static fi_ops_fabric ops{.size = sizeof(ops), .domain = open_domain, .trywait = cq_trywait};
    auto* fabric = new Fabric();
    fabric->fid = {FI_CLASS_FABRIC, nullptr, &fid_ops};
    fabric->ops = &ops;
    *made = fabric;
    return 0;
}
// Of nothing: an empty one.
fi_info* fi_dupinfo(const fi_info* info) {
    if (info) return nullptr;
    auto* made = make_part<fi_info>();
    made->ep_attr = make_part<fi_ep_attr>();
    made->tx_attr = make_part<fi_tx_attr>();
    made->domain_attr = make_part<fi_domain_attr>();
    made->fabric_attr = make_part<fi_fabric_attr>();
    return made;
}
void fi_freeinfo(fi_info* info) {
    free(info->domain_attr->name);
    free(info->fabric_attr->prov_name);
    free(info->ep_attr);
    free(info->tx_attr);
    free(info->domain_attr);
    free(info->fabric_attr);
    free(info);
}
int fi_getinfo(uint32_t, const char*, const char*, uint64_t, const fi_info* hints, fi_info** found) {
    if (std::strcmp(hints->fabric_attr->prov_name, kProvider) != 0) return -FI_ENODATA;
    fi_info* info = *found = fi_dupinfo(nullptr);
    info->domain_attr->name = copy_text(hints->domain_attr->name);
    info->domain_attr->mr_mode = FI_MR_PROV_KEY;
    info->domain_attr->cq_data_size = sizeof(uint64_t);
    info->ep_attr->max_msg_size = kMaxWriteBytes;
    info->tx_attr->iov_limit = info->tx_attr->rma_iov_limit = 3;
    info->fabric_attr->prov_name = copy_text(kProvider);
    return 0;
}
const char* fi_strerror(int code) {
    return strerror(code);
}
uint32_t fi_version(void) {
    return FI_VERSION(1, 17);
}
}
