#include "graphs.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace sim {
namespace {

struct Captures {
  std::mutex mutex;
  std::vector<Graph*> under_way;
  std::atomic<int> count{0};
  std::map<uint64_t, GraphPool*> pools;
  uint64_t next_pool = uint64_t(1) << 32; // those without a name
};
Captures& captures() {
  static auto& all = *new Captures;
  return all;
}

const char* kSpoilt = "sim error: operation failed due to a previous error during capture";
} // namespace

void forbid_in_captures() {
  if (!captures().count) return;
  std::lock_guard lock(captures().mutex);
  bool is_forbidden = false;
  for (Graph* graph : captures().under_way) {
    bool is_ours = graph->thread == std::this_thread::get_id();
    if (is_ours ? graph->mode == CaptureMode::kRelaxed : graph->mode != CaptureMode::kGlobal)
      continue;
    graph->is_spoilt = is_forbidden = true;
  }
  if (is_forbidden)
    fail(kCaptureUnsupported, "sim error: operation not permitted when stream is capturing");
}

bool is_capturing_here() {
  if (!captures().count) return false;
  std::lock_guard lock(captures().mutex);
  return std::any_of(captures().under_way.begin(), captures().under_way.end(),
      [](auto* graph) { return graph->thread == std::this_thread::get_id(); });
}

bool capture(DeviceState& device, int64_t stream, Task& task) {
  Graph* graph = device.streams[stream].graph;
  if (!graph) return false;
  if (graph->is_spoilt) fail(kCaptureInvalidated, kSpoilt);
  note_in(*graph, std::move(task));
  return true;
}
void note_in(Graph& graph, Task task) { graph.tasks_.push_back(std::move(task)); }

std::multimap<size_t, Block*>& blocks_of(GraphPool& pool) { return pool.blocks; }
GraphPool* pool_of(Graph& graph) { return graph.pool; }

void Graph::begin(uint64_t pool_name, CaptureMode how) {
  device_ = current_device();
  stream_ = current_stream(device_);
  check(device_);
  TORCH_CHECK(stream_ != 0, "sim graphs must be captured on a non-default stream");
  TORCH_CHECK(!is_ready_, "this graph was captured already; reset it first");
  std::lock_guard lock(captures().mutex);
  auto name = pool_name ? pool_name : captures().next_pool++;
  auto& found = captures().pools[name];
  if (!found) found = new GraphPool{{0, name}};
  pool = found;
  pool->num_graphs++;
  mode = how;
  thread = std::this_thread::get_id();
  is_spoilt = false;
  is_under_way_ = true;
  captures().under_way.push_back(this);
  captures().count++;
  device_at(device_).streams[stream_].graph = this;
}

void Graph::end() {
  TORCH_CHECK(is_under_way_, "no capture is under way");
  std::lock_guard lock(captures().mutex);
  device_at(device_).streams[stream_].graph = nullptr;
  std::erase(captures().under_way, this);
  captures().count--;
  is_under_way_ = false;
  if (is_spoilt) {
    tasks_.clear();
    fail(kCaptureInvalidated, kSpoilt);
  }
  is_ready_ = true;
}

void Graph::replay() {
  TORCH_CHECK(is_ready_, "nothing was captured");
  auto again = std::make_shared<std::vector<Task>>(tasks_);
  submit_always(device_, current_stream(device_), [again] {
    for (auto& task : *again) task();
  });
}

void Graph::reset() {
  if (is_under_way_) {
    is_spoilt = true;
    try {
      end();
    } catch (const c10::Error&) { // there is nobody who could mend it
    }
  }
  tasks_.clear();
  is_ready_ = false;
  if (!pool) return;
  auto& device = device_at(device_);
  std::scoped_lock lock(captures().mutex, device.memory);
  if (--pool->num_graphs == 0) { // blocks that are still in use keep it
    for (auto& [size, block] : pool->blocks) {
      block->pool = nullptr;
      device.cached[block->stream].emplace(size, block);
    }
    pool->blocks.clear();
    captures().pools.erase(pool->id.second);
  }
  pool = nullptr;
}
} // namespace sim
