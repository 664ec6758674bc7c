// The networks of this host that an engine can use: a provider of libfabric and one of its interfaces.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fi_errno.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "fabric/library.hpp"

namespace tracekern {

struct Net {
    std::string provider;  // "tcp", "shm", "efa" ...
    std::string source;    // an IP address, or the name of a domain; "": the provider's own choice
    std::string fabric;
    uint64_t bits_per_s = 0;  // 0: not known

    bool operator==(const Net& other) const {
        return std::tie(provider, source) == std::tie(other.provider, other.source);
    }
};

// What every engine asks of a provider. FI_SOURCE: an immediate is to say who sent it.
inline fi_info* make_hints(const FabricLibrary& library, const std::string& provider) {
    fi_info* hints = library.dupinfo(nullptr);
    hints->fabric_attr->prov_name = strdup(provider.c_str());
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = FI_MSG | FI_RMA | FI_SOURCE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_PROV_KEY | FI_MR_ALLOCATED | FI_MR_LOCAL;
    hints->domain_attr->cq_data_size = 4;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->av_type = FI_AV_TABLE;
    return hints;
}

// All interfaces of a provider that do what an engine needs; throws std::runtime_error where there is none. The caller
// frees the list.
inline fi_info* find_infos(const FabricLibrary& library, const std::string& provider, const std::string& source) {
    fi_info* hints = make_hints(library, provider);
    in6_addr address;
    const bool is_node = inet_pton(AF_INET, source.c_str(), &address) == 1 ||
                         inet_pton(AF_INET6, source.c_str(), &address) == 1 || (provider == "shm" && !source.empty());
    if (!is_node && !source.empty()) hints->domain_attr->name = strdup(source.c_str());
    fi_info* found = nullptr;
    const int result = library.getinfo(
        FabricLibrary::kVersion, is_node ? source.c_str() : nullptr, nullptr, is_node ? FI_SOURCE : 0, hints, &found);
    library.freeinfo(hints);
    struct statvfs room{};
    if (result == -FI_ENODATA && provider == "shm" && statvfs("/dev/shm", &room) == 0) {
        throw std::runtime_error("provider shm: /dev/shm has " + std::to_string(room.f_bavail * room.f_frsize >> 20) +
                                 " MiB free, too few for an engine (13 MiB a core), or libfabric lacks the provider");
    }
    const std::string which = "provider " + provider + (source.empty() ? "" : " on " + source);
    library.require(result, which);
    return found;
}

inline std::string source_of(const fi_info& info) {
    char text[INET6_ADDRSTRLEN] = "";
    if (info.addr_format == FI_SOCKADDR_IN && info.src_addr) {
        inet_ntop(AF_INET, &static_cast<const sockaddr_in*>(info.src_addr)->sin_addr, text, sizeof(text));
        return text;
    }
    if (info.addr_format == FI_SOCKADDR_IN6 && info.src_addr) {
        inet_ntop(AF_INET6, &static_cast<const sockaddr_in6*>(info.src_addr)->sin6_addr, text, sizeof(text));
        return text;
    }
    return info.domain_attr->name ? info.domain_attr->name : "";
}

// Those of the providers in this list that are here.
inline std::vector<Net> find_nets(const FabricLibrary& library, const std::vector<std::string>& providers) {
    std::vector<Net> nets;
    for (const std::string& provider : providers) {
        fi_info* first = nullptr;
        try {
            first = find_infos(library, provider, "");
        } catch (const std::runtime_error&) {
            continue;  // not on this host
        }
        for (const fi_info* info = first; info; info = info->next) {
            const uint64_t speed = info->nic && info->nic->link_attr ? info->nic->link_attr->speed : 0;
            Net net{provider, source_of(*info), info->fabric_attr->name ? info->fabric_attr->name : "", speed};
            if (std::find(nets.begin(), nets.end(), net) == nets.end()) nets.push_back(std::move(net));
        }
        library.freeinfo(first);
    }
    return nets;
}

}  // namespace tracekern
