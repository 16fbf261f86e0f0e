// What the virtual machine can do per second, and how long a piece of work takes.
//
// All times are whole nanoseconds and all rates whole numbers per second, so that the same
// program gives the same clock on every computer: no floating point enters a duration.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>

namespace tide {

using Nanoseconds = int64_t;

struct Machine {
  std::string name = "h100";
  int64_t flops_fp64 = 67'000'000'000'000;
  int64_t flops_fp32 = 67'000'000'000'000;
  int64_t flops_half = 989'000'000'000'000;
  int64_t flops_fp8 = 1'979'000'000'000'000;
  int64_t memory_bandwidth = 3'350'000'000'000;
  int64_t host_to_device_bandwidth = 55'000'000'000;
  int64_t device_to_host_bandwidth = 55'000'000'000;
  int64_t fabric_bandwidth = 450'000'000'000;
  int64_t network_bandwidth = 50'000'000'000;
  int64_t devices_per_node = 0; // neighbouring ranks share a node; 0: all of them do
  Nanoseconds launch = 5'000; // host time to issue one operator
  Nanoseconds kernel_latency = 2'000; // device time of an empty kernel
  Nanoseconds copy_latency = 8'000; // link time of an empty copy
  Nanoseconds fabric_latency = 15'000; // an empty collective
};

enum class Link : int { HostToDevice = 0, DeviceToHost = 1 };

// One piece of device work, before the machine gives it a duration.
struct Work {
  int64_t flops = 0;
  int64_t bytes = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

// A hidden efficiency, in thousandths, for a kind of kernel: 300 to 900, and 500 to 1000 for
// links. Seed 0 means "no hidden efficiency" and gives 1000.
int64_t kernel_efficiency(const std::string& kind, uint64_t seed);
int64_t link_efficiency(const std::string& kind, uint64_t seed);

Nanoseconds kernel_duration(const Machine&, const std::string& kind, const Work&, uint64_t seed);
Nanoseconds copy_duration(const Machine&, Link, int64_t bytes, uint64_t seed);

// What a collective sends over the busiest wires of one rank.
struct Traffic {
  int64_t inside = 0; // bytes to devices of its node
  int64_t outside = 0; // bytes to other nodes
  int64_t ports = 1; // network ports that share what goes outside
  int64_t rounds = 1; // latency-bound steps of the algorithm: a ring of n has n - 1
};

// The slower of the two: both are at work at the same time.
Nanoseconds fabric_duration(const Machine&, const Traffic&, uint64_t seed);

} // namespace tide
