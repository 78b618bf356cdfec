// Pinned host memory: a caching allocator of it, and host memory that was registered as pinned.
#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

struct HostBlock {
  char* start;
  size_t size;
  std::vector<MomentPtr> uses;
};

bool is_unused(HostBlock* block) {
  return std::all_of(
      block->uses.begin(), block->uses.end(), [](auto& use) { return use->is_done(); });
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &drop, c10::Device(c10::DeviceType::CPU)};
    std::lock_guard lock(mutex_);
    reclaim();
    size_t size = 4096;
    while (size < bytes) size *= 2; // as CUDA's
    HostBlock* block;
    if (auto found = cached_.find(size); found != cached_.end()) {
      block = found->second;
      cached_.erase(found);
    } else {
      forbid_in_captures();
      block = new HostBlock{static_cast<char*>(std::aligned_alloc(4096, size)), size, {}};
      std::memset(block->start, kPoison, size);
      blocks_[block->start] = block;
    }
    return {block->start, block, &drop, c10::Device(c10::DeviceType::CPU)};
  }

  bool has(const void* address) {
    std::lock_guard lock(mutex_);
    return holding(address) != nullptr;
  }
  void add_use(const void* address, MomentPtr use) {
    std::lock_guard lock(mutex_);
    auto* block = holding(address);
    if (!block) return;
    std::erase_if(block->uses, [](auto& each) { return each->is_done(); });
    block->uses.push_back(std::move(use));
  }

  void add(char* start, size_t bytes) {
    forbid_in_captures();
    std::lock_guard lock(mutex_);
    TORCH_CHECK(start && bytes, "sim error: there is nothing to register");
    TORCH_CHECK(!holding(start) && !holding(start + bytes - 1),
        "sim error: part or all of the requested memory range is already mapped");
    blocks_[start] = new HostBlock{start, bytes, {}};
  }
  void remove(char* start) {
    std::unique_lock lock(mutex_);
    auto found = blocks_.find(start);
    TORCH_CHECK(found != blocks_.end(), "sim error: the memory was not registered");
    auto* block = found->second;
    blocks_.erase(found);
    lock.unlock();
    for (auto& use : block->uses) use->wait(); // copies that are under way
    delete block;
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    keep_pinned(pointer, stream.device_index(), stream.id());
    return true;
  }
  void empty_cache() override {
    std::lock_guard lock(mutex_);
    for (auto& [size, block] : cached_) {
      blocks_.erase(block->start);
      std::free(block->start);
      delete block;
    }
    cached_.clear();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }

 private:
  static void drop(void* context);

  void reclaim() {
    if (!pending_.empty()) forbid_in_captures(); // CUDA's allocator asks events
    std::erase_if(pending_, [&](auto* block) {
      if (!is_unused(block)) return false;
      recycle(block);
      return true;
    });
  }
  void recycle(HostBlock* block) {
    block->uses.clear();
    std::memset(block->start, kPoison, block->size);
    cached_.emplace(block->size, block);
  }
  HostBlock* holding(const void* address) {
    auto* at = static_cast<char*>(const_cast<void*>(address));
    auto it = blocks_.upper_bound(at);
    if (it == blocks_.begin()) return nullptr;
    auto* block = std::prev(it)->second;
    return at < block->start + block->size ? block : nullptr;
  }

  std::mutex mutex_;
  std::map<char*, HostBlock*> blocks_; // all
  std::multimap<size_t, HostBlock*> cached_;
  std::deque<HostBlock*> pending_; // dropped, while streams copy from or to them
};

PinnedAllocator& pinned() {
  static auto& one = *new PinnedAllocator;
  return one;
}

void PinnedAllocator::drop(void* context) {
  if (!context || is_forked()) return;
  auto* block = static_cast<HostBlock*>(context);
  std::lock_guard lock(pinned().mutex_);
  if (is_unused(block))
    pinned().recycle(block);
  else
    pinned().pending_.push_back(block);
}
} // namespace

bool is_pinned(const void* address) { return pinned().has(address); }
void keep_pinned(const void* address, int device, int64_t stream) {
  if (!device_at(device).streams[stream].graph) pinned().add_use(address, record(device, stream));
}
void register_host(char* start, size_t bytes) { pinned().add(start, bytes); }
void unregister_host(char* start) { pinned().remove(start); }
c10::Allocator* pinned_allocator() { return &pinned(); }
} // namespace sim

REGISTER_HOST_ALLOCATOR(sim::kType, &sim::pinned())
