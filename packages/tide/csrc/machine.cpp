#include "machine.h"

#include <algorithm>

namespace tide {
namespace {

// Rounded up: work is never free, and never negative by an overflow (the product of FLOPs and
// 10^9 does not fit 64 bits, hence the wide integer).
Nanoseconds time_for(int64_t amount, int64_t per_second, int64_t efficiency) {
  if (amount <= 0) {
    return 0;
  }
  const __int128 numerator = static_cast<__int128>(amount) * 1'000'000'000 * 1000;
  const __int128 denominator = static_cast<__int128>(per_second) * efficiency;
  return static_cast<Nanoseconds>((numerator + denominator - 1) / denominator);
}

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// std::hash may differ between standard libraries; this one is fixed.
uint64_t stable_hash(const std::string& text, uint64_t seed) {
  uint64_t h = 1469598103934665603ULL;
  for (const unsigned char c : text) {
    h = (h ^ c) * 1099511628211ULL;
  }
  return mix(h ^ mix(seed));
}

int64_t rate_for(const Machine& machine, c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Half:
    case c10::ScalarType::BFloat16:
      return machine.flops_half;
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexDouble:
      return machine.flops_fp64;
    case c10::ScalarType::Float8_e4m3fn:
    case c10::ScalarType::Float8_e5m2:
      return machine.flops_fp8;
    default:
      return machine.flops_fp32;
  }
}

} // namespace

int64_t kernel_efficiency(const std::string& kind, uint64_t seed) {
  return seed == 0 ? 1000 : 300 + static_cast<int64_t>(stable_hash(kind, seed) % 601);
}

int64_t link_efficiency(const std::string& kind, uint64_t seed) {
  return seed == 0 ? 1000 : 500 + static_cast<int64_t>(stable_hash(kind, seed) % 501);
}

Nanoseconds kernel_duration(
    const Machine& machine, const std::string& kind, const Work& work, uint64_t seed) {
  const int64_t efficiency = kernel_efficiency(kind, seed);
  const auto compute = time_for(work.flops, rate_for(machine, work.dtype), efficiency);
  const auto memory = time_for(work.bytes, machine.memory_bandwidth, efficiency);
  return machine.kernel_latency + std::max(compute, memory);
}

Nanoseconds copy_duration(const Machine& machine, Link link, int64_t bytes, uint64_t seed) {
  const bool in = link == Link::HostToDevice;
  const auto rate = in ? machine.host_to_device_bandwidth : machine.device_to_host_bandwidth;
  const auto efficiency = link_efficiency(in ? "link:in" : "link:out", seed);
  return machine.copy_latency + time_for(bytes, rate, efficiency);
}

Nanoseconds fabric_duration(const Machine& machine, const Traffic& traffic, uint64_t seed) {
  const auto inside =
      time_for(traffic.inside, machine.fabric_bandwidth, link_efficiency("link:fabric", seed));
  const auto outside = time_for(
      traffic.outside, machine.network_bandwidth * traffic.ports,
      link_efficiency("link:network", seed));
  return machine.fabric_latency * std::max<int64_t>(traffic.rounds, 1) + std::max(inside, outside);
}

} // namespace tide
