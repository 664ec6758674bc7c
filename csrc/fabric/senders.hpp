// The engines that may raise immediates here, as threads that wait know them: who has raised one, and who has left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tracekern {

// Not locked: its owner does that. Engines are told by their numbers, and named by their main addresses.
class Senders {
public:
    // How often each has raised an immediate; engine 0 is who the provider does not tell.
    using Counts = std::vector<std::pair<uint64_t, uint64_t>>;

    static void count(Counts& counts, uint64_t engine) {
        for (auto& [known, number] : counts) {
            if (known == engine) return void(++number);
        }
        counts.emplace_back(engine, 1);
    }
    static bool has(const Counts& counts, uint64_t engine) { return find(counts, engine) != 0; }

    void meet(uint64_t engine, const std::string& address, const std::string& name) {
        all_[engine] = {address, name, false};
    }
    void leave(uint64_t engine) { all_[engine].has_left = true; }
    const std::string& address_of(uint64_t engine) { return all_[engine].address; }

    bool is_any_there() const {
        return std::any_of(all_.begin(), all_.end(), [](const auto& one) { return !one.second.has_left; });
    }
    // One of these that has left; "": none has.
    std::string who_has_left(const std::set<std::string>& addresses) const {
        for (const auto& [engine, sender] : all_) {
            if (sender.has_left && addresses.contains(sender.address)) return sender.name;
        }
        return "";
    }
    // "engine A raised it 0 times; engine B, which has ended, raised it once": who did so least comes first.
    // addresses: of those who are meant; none: all.
    std::string describe(const Counts& counts, const std::set<std::string>& addresses) const {
        std::vector<std::pair<uint64_t, std::string>> told;
        for (const auto& [engine, sender] : all_) {
            if (!addresses.empty() && !addresses.contains(sender.address)) continue;
            told.emplace_back(find(counts, engine), sender.name + (sender.has_left ? ", which has ended," : ""));
        }
        if (told.size() < addresses.size()) {
            const size_t number = addresses.size() - told.size();
            told.emplace_back(0,
                              number == 1 ? "one engine that has not met this one"
                                          : std::to_string(number) + " engines that have not met this one");
        }
        if (told.empty()) return "no engine has met this one";
        std::sort(told.begin(), told.end());
        std::string text;
        for (size_t i = 0; i < std::min(told.size(), kMostTold); ++i) {
            const auto& [number, name] = told[i];
            text += (i ? "; " : "") + name + " raised it " + (number == 1 ? "once" : std::to_string(number) + " times");
        }
        return told.size() > kMostTold ? text + " ..." : text;
    }

private:
    static constexpr size_t kMostTold = 4;

    static uint64_t find(const Counts& counts, uint64_t engine) {
        const auto found =
            std::find_if(counts.begin(), counts.end(), [&](const auto& one) { return one.first == engine; });
        return found == counts.end() ? 0 : found->second;
    }

    struct Sender {
        std::string address, name;
        bool has_left = false;
    };
    std::map<uint64_t, Sender> all_;
};

}  // namespace tracekern
