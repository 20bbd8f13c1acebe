#include "kernel_lib.h"

#include <dlfcn.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "cpu.h"

namespace ktc {
namespace {

std::runtime_error load_error(const std::string& path, const std::string& reason) {
  return std::runtime_error("kernel library " + path + ": " + reason);
}

int64_t effective_min_rows(const ktc_gemm_kernel& kernel, const MinRows& overrides) {
  const std::string name = kernel.name;
  int64_t rows = kernel.min_rows;
  size_t longest = 0;
  for (const auto& [prefix, value] : overrides) {
    if (prefix.size() <= longest || name.compare(0, prefix.size(), prefix) != 0) continue;
    longest = prefix.size();
    rows = value;
  }
  return rows;
}

}  // namespace

KernelLib::KernelLib(const std::string& path) : path_(path) {
  dlerror();
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw load_error(path, reason ? reason : "cannot be loaded");
  }
  // From here on the handle is kept even on failure: unloading foreign code is never worth it.
  const auto query = reinterpret_cast<ktc_kernel_query_fn>(dlsym(handle, KTC_QUERY_SYMBOL));
  if (query == nullptr) throw load_error(path, "does not export " KTC_QUERY_SYMBOL);
  lib_ = query(KTC_ABI_VERSION);
  if (lib_ == nullptr)
    throw load_error(path, "does not support kernel ABI " + std::to_string(KTC_ABI_VERSION) + "; rebuild it");
  if (lib_->struct_size < sizeof(ktc_kernel_lib) || lib_->abi_version != KTC_ABI_VERSION)
    throw load_error(path, "has kernel ABI " + std::to_string(lib_->abi_version) + ", this runtime has " +
                               std::to_string(KTC_ABI_VERSION) + "; rebuild it");
  if (lib_->layout_version != KTC_LAYOUT_VERSION)
    throw load_error(path, "reads tile layout " + std::to_string(lib_->layout_version) +
                               ", this runtime has " + std::to_string(KTC_LAYOUT_VERSION) + "; rebuild it");
  if (lib_->kernel_count == 0 || lib_->kernels == nullptr) throw load_error(path, "holds no kernels");
  check_machine();
  // A later minor revision of the library may have longer records.
  const uint32_t stride = lib_->kernels->struct_size;
  if (stride < sizeof(ktc_gemm_kernel)) throw load_error(path, "has kernel records that are too short");
  const char* base = reinterpret_cast<const char*>(lib_->kernels);
  for (uint32_t i = 0; i < lib_->kernel_count; ++i) {
    const auto* kernel = reinterpret_cast<const ktc_gemm_kernel*>(base + static_cast<size_t>(i) * stride);
    if (kernel->gemm == nullptr || kernel->quantize == nullptr || kernel->name == nullptr)
      throw load_error(path, "kernel record " + std::to_string(i) + " is incomplete");
    kernels_.push_back(kernel);
  }
}

// The choice of a variant is made before loading; this is the last fence against an illegal instruction.
void KernelLib::check_machine() const {
  const std::vector<std::string> here = cpu_features();
  for (const std::string& feature : required_features()) {
    if (!std::binary_search(here.begin(), here.end(), feature))
      throw load_error(path_, "needs the CPU feature " + feature + ", which this machine does not offer");
    if (feature != "amx_tile") continue;
    const auto [granted, reason] = amx_permission();
    if (!granted) throw load_error(path_, "needs AMX tiles: " + reason);
  }
}

std::vector<std::string> KernelLib::required_features() const {
  std::istringstream words(lib_->required_features ? lib_->required_features : "");
  std::vector<std::string> names;
  for (std::string word; words >> word;) names.push_back(word);
  return names;
}

KernelChoice::KernelChoice(const KernelLib& lib, const Scheme& scheme, ktc_epilogue epilogue, int64_t k_pad,
                           const std::string& force, const MinRows& min_rows) {
  std::string others;
  for (const ktc_gemm_kernel* kernel : lib.kernels()) {
    if (kernel->format != scheme.format || kernel->scale != scheme.scale || kernel->group != scheme.group ||
        kernel->epilogue != epilogue || (kernel->k != 0 && kernel->k != k_pad))
      continue;
    if (std::string(kernel->name).find(force) == std::string::npos) {
      others += std::string(others.empty() ? "" : ", ") + kernel->name;
      continue;
    }
    entries_.push_back(
        {kernel, effective_min_rows(*kernel, min_rows), std::make_unique<std::atomic<int64_t>>(0)});
  }
  if (entries_.empty()) {
    std::string message = "kernel library " + lib.path() + " has no kernel for " +
                          format_name(scheme.format) + ", scale " + scale_name(scheme.scale) + ", group " +
                          std::to_string(scheme.group) + ", epilogue " + epilogue_name(epilogue) + ", k " +
                          std::to_string(k_pad);
    if (!force.empty()) message += " whose name contains '" + force + "'";
    if (!others.empty()) message += "; it has " + others;
    throw std::invalid_argument(message);
  }
  std::stable_sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
    if (a.min_rows != b.min_rows) return a.min_rows < b.min_rows;
    return a.kernel->k != 0 && b.kernel->k == 0;
  });
}

size_t KernelChoice::index(int64_t rows) const {
  size_t best = 0;
  for (size_t i = 1; i < entries_.size(); ++i) {
    if (entries_[i].min_rows > rows) break;
    if (entries_[i].min_rows > entries_[best].min_rows) best = i;
  }
  return best;
}

int64_t KernelChoice::scratch_bytes() const {
  int64_t bytes = 0;
  for (const Entry& e : entries_) bytes = std::max(bytes, e.kernel->scratch_bytes);
  return bytes;
}

std::vector<KernelChoice::Use> KernelChoice::report() const {
  std::vector<Use> uses;
  for (const Entry& e : entries_) {
    const int64_t calls = e.calls->load(std::memory_order_relaxed);
    if (calls > 0) uses.push_back({e.kernel->name, calls});
  }
  return uses;
}

void KernelChoice::add_min_rows(std::map<std::string, int64_t>& all) const {
  for (const Entry& e : entries_) all[e.kernel->name] = e.min_rows;
}

void check_kernel(int status, const char* kernel) {
  if (status == KTC_OK) return;
  const char* reason = status == KTC_ERR_ARGS          ? "rejected its arguments"
                       : status == KTC_ERR_UNSUPPORTED ? "does not support this shape"
                                                       : "failed";
  throw std::runtime_error(std::string("kernel ") + kernel + " " + reason + " (status " +
                           std::to_string(status) + ")");
}

const char* epilogue_name(int epilogue) {
  constexpr const char* names[] = {"store", "scatter_add", "silu_mul", "silu_clamp", "swiglu_oai"};
  return epilogue >= 0 && epilogue < 5 ? names[epilogue] : "unknown";
}

}  // namespace ktc
