// What this machine offers a process: CPU features, AMX permission, NUMA nodes; and a thread a CPU of its
// own.
#pragma once

#include <pthread.h>

#include <string>
#include <utility>
#include <vector>

namespace ktc {

// Names as in /proc/cpuinfo of the features that both the CPU and the operating system enable, sorted.
std::vector<std::string> cpu_features();

// Asks once per process for AMX tile state. (granted, reason)
std::pair<bool, std::string> amx_permission();

struct NumaNode {
  int id;                 // as in /sys/devices/system/node
  std::vector<int> cpus;  // those this process may use, ascending
};

// Nodes with at least one usable CPU. Without /sys, one node with every usable CPU.
std::vector<NumaNode> numa_nodes();

// CPUs in the affinity mask of the calling thread.
std::vector<int> usable_cpus();

// 0 or an errno value.
int pin_thread(pthread_t thread, int cpu);

}  // namespace ktc
