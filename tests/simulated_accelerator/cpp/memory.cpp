// The caching allocator of device memory. It gives a freed block to the next who asks, and poisons
// it in the order of its stream, so that whoever still uses it sees so.
#include "runtime.h"

#include <c10/core/Allocator.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

constexpr size_t kGrain = 512, kPage = 4096;

void drop(void* context);

/// The last freed of the smallest blocks that fit.
Block* take(std::multimap<size_t, Block*>& from, size_t size) {
  auto found = from.lower_bound(size);
  if (found == from.end() || found->first > size + std::max(size / 4, kGrain)) return nullptr;
  auto last = std::prev(from.upper_bound(found->first));
  Block* block = last->second;
  from.erase(last);
  return block;
}

/// A new block, as by cudaMalloc; nullptr if the device is full.
Block* carve(DeviceState& device, int index, int64_t stream, size_t size) {
  if (!is_capturing_here()) forbid_in_captures();
  if (size_t(device.stats.reserved_bytes[0].current) + size > device.limit) return nullptr;
  for (auto it = device.space.begin(); it != device.space.end(); ++it) {
    auto [start, length] = *it;
    if (length < size) continue;
    if (!reserve(device.number, size, device.capacity)) return nullptr;
    device.space.erase(it);
    if (length > size) device.space[start + size] = length - size;
    std::memset(start + device.offset, kPoison, size);
    device.stats.reserved_bytes[0].increase(size);
    device.stats.segment[0].increase(1);
    return new Block{index, stream, start, size, {}};
  }
  return nullptr;
}

void give_back(DeviceState& device, Block* block) {
  auto from =
      (reinterpret_cast<uintptr_t>(block->start + device.offset) + kPage - 1) / kPage * kPage;
  auto to = reinterpret_cast<uintptr_t>(block->start + device.offset + block->size) / kPage * kPage;
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
  auto at = device.space.emplace(block->start, block->size).first;
  if (auto after = std::next(at);
      after != device.space.end() && at->first + at->second == after->first) {
    at->second += after->second;
    device.space.erase(after);
  }
  if (at != device.space.begin()) {
    auto before = std::prev(at);
    if (before->first + before->second == at->first) {
      before->second += at->second;
      device.space.erase(at);
    }
  }
  device.stats.reserved_bytes[0].decrease(block->size);
  device.stats.segment[0].decrease(1);
  release(device.number, block->size);
  delete block;
}

void poison(DeviceState& device, Block* block) {
  Task task = [at = block->start + device.offset, size = block->size] {
    std::memset(at, kPoison, size);
  };
  auto& stream = device.streams[block->stream];
  Graph* graph = stream.graph;
  if (graph && block->pool == pool_of(*graph) && is_capturing_here())
    note_in(*graph, std::move(task));
  else
    stream.push(block->device, std::move(task));
}

void keep_for_reuse(DeviceState& device, Block* block) {
  poison(device, block); // after all that its stream was given
  block->used_on.clear();
  device.stats.active[0].decrease(1);
  device.stats.active_bytes[0].decrease(block->size);
  (block->pool ? blocks_of(*block->pool) : device.cached[block->stream])
      .emplace(block->size, block);
}

/// Take back blocks that other streams have done with.
void reclaim(DeviceState& device) {
  std::erase_if(device.pending, [&](auto& freed) {
    auto& [block, uses] = freed;
    if (!std::all_of(uses.begin(), uses.end(), [](auto& use) { return use->is_done(); }))
      return false;
    keep_for_reuse(device, block);
    return true;
  });
}

/// Return what is cached to the device. As cudaFree, this waits for all streams.
void flush(DeviceState& device, std::unique_lock<std::mutex>& lock) {
  for (int i = 0; i < 2; i++) { // the second time for what the first one's reclaim poisons
    lock.unlock();              // a failing operation needs it to end
    for (auto& stream : device.streams) stream.wait_until_idle();
    lock.lock();
    reclaim(device);
  }
  for (auto& [stream, blocks] : device.cached) {
    auto& state = device.streams[stream];
    std::lock_guard hold(state.mutex);
    if (state.num_completed != state.num_submitted) continue; // used again meanwhile
    for (auto& [size, block] : blocks) give_back(device, block);
    blocks.clear();
  }
}

template <class F>
void each_stat(DeviceState& device, F f) {
  auto& s = device.stats;
  for (auto* all : {&s.allocation, &s.segment, &s.active, &s.allocated_bytes, &s.reserved_bytes,
           &s.active_bytes, &s.requested_bytes})
    for (auto& one : *all) f(one);
}

class CachingAllocator final : public c10::DeviceAllocator {
 public:
  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  c10::DataPtr allocate(size_t bytes) override {
    int index = current_device();
    check(index);
    c10::Device where(kType, c10::DeviceIndex(index));
    if (bytes == 0) return {nullptr, nullptr, &drop, where};
    auto& device = device_at(index);
    int64_t stream = current_stream(index);
    Graph* graph = device.streams[stream].graph;
    std::unique_lock lock(device.memory);
    Block* block = find(device, index, stream, graph, (bytes + kGrain - 1) / kGrain * kGrain, lock);
    if (!block) refuse(device, index, bytes);
    block->stream = stream;
    if (graph) block->pool = pool_of(*graph);
    device.stats.allocation[0].increase(1);
    device.stats.active[0].increase(1);
    device.stats.allocated_bytes[0].increase(block->size);
    device.stats.active_bytes[0].increase(block->size);
    device.stats.requested_bytes[0].increase(bytes);
    return {block->start, block, &drop, where};
  }

  void emptyCache(c10::MempoolId_t) override {
    check(current_device());
    forbid_in_captures();
    for (int i = 0; i < num_devices(); i++) {
      std::unique_lock lock(device_at(i).memory);
      flush(device_at(i), lock);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (!data.get() || data.get_deleter() != &drop) return;
    auto* block = static_cast<Block*>(data.get_context());
    std::lock_guard lock(device_at(block->device).memory);
    if (block->stream != stream.id()) block->used_on.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    std::lock_guard lock(device_at(index).memory);
    return device_at(index).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    std::lock_guard lock(device_at(index).memory);
    each_stat(device_at(index), [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    std::lock_guard lock(device_at(index).memory);
    each_stat(device_at(index), [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    check(index);
    auto& device = device_at(index);
    size_t used = used_bytes(device.number);
    return {device.capacity - std::min(used, device.capacity), device.capacity};
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    int device = device_of(to);
    submit(device, current_stream(device),
        [to = kernel_address(to), from = kernel_address(from), count] {
          std::memcpy(to, from, count);
        });
  }

 private:
  static Block* find(DeviceState& device, int index, int64_t stream, Graph* graph, size_t size,
      std::unique_lock<std::mutex>& lock) {
    reclaim(device);
    if (device.allocations_until_oom >= 0 && device.oom_thread == std::this_thread::get_id() &&
        device.allocations_until_oom.fetch_sub(1) == 0)
      return nullptr;
    auto& cached = graph ? blocks_of(*pool_of(*graph)) : device.cached[stream];
    if (Block* block = take(cached, size)) return block;
    if (Block* block = carve(device, index, stream, size)) return block;
    flush(device, lock);
    device.stats.num_alloc_retries++;
    return carve(device, index, stream, size);
  }

  [[noreturn]] static void refuse(DeviceState& device, int index, size_t bytes) {
    device.stats.num_ooms++;
    throw c10::OutOfMemoryError({__func__, __FILE__, uint32_t(__LINE__)},
        c10::str("sim out of memory. Tried to allocate ", bytes, " bytes. Device ", index,
            " has a capacity of ", device.capacity, " bytes, of which processes have ",
            used_bytes(device.number), ". This process may have ", device.limit, "."));
  }
};

CachingAllocator the_allocator;

void drop(void* context) {
  if (!context || is_forked()) return;
  auto* block = static_cast<Block*>(context);
  auto& device = device_at(block->device);
  std::lock_guard lock(device.memory);
  device.stats.allocation[0].decrease(1);
  device.stats.allocated_bytes[0].decrease(block->size);
  if (block->used_on.empty()) {
    keep_for_reuse(device, block);
    return;
  }
  std::vector<MomentPtr> uses;
  for (int64_t stream : block->used_on) {
    uses.push_back(std::make_shared<Moment>());
    device.streams[stream].push(block->device, [use = uses.back()] { use->finish(); });
  }
  device.pending.emplace_back(block, std::move(uses));
}
} // namespace

c10::DeviceAllocator& allocator() { return the_allocator; }
} // namespace sim

REGISTER_ALLOCATOR(sim::kType, &sim::allocator())
