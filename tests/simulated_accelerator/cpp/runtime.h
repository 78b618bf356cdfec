// What the parts of the simulated accelerator know of each other: streams, events, memory, graphs.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kPoison = 0xCB;
constexpr int kMaxDevices = 16;
constexpr int kPoolSize = 32;
// The default one, and two pools of streams that are handed out in turns, as CUDA's. The second one
// has those of high priority, which communicators use.
constexpr int kNumStreams = 1 + 2 * kPoolSize;

// The numbers that CUDA gives to these errors.
constexpr int kIllegalAccess = 700, kAssert = 710, kUnknown = 999;
constexpr int kCaptureUnsupported = 900, kCaptureInvalidated = 901;

using Task = std::function<void()>;
struct Graph;
struct GraphPool;

/// One recording of an event. It is done once its stream has come to it.
class Moment {
 public:
  void finish();
  void wait();
  bool is_done();
  std::chrono::steady_clock::time_point at;
  std::atomic<Graph*> captured{nullptr}; // the graph it was recorded in, if any

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ = false;
};
using MomentPtr = std::shared_ptr<Moment>;

/// A stream: a queue of work, and the thread that does it.
struct StreamState {
  struct Entry {
    Task task;
    MomentPtr end; // that is reached with it
  };
  std::mutex mutex;
  std::condition_variable more, idle;
  std::deque<Entry> entries;
  uint64_t num_submitted = 0, num_completed = 0;
  bool is_started = false;
  std::atomic<Graph*> graph{nullptr}; // that captures it
  void push(int device, Task task, MomentPtr end = nullptr);
  void wait_until_idle();
};

/// A piece of device memory. It is never split.
struct Block {
  int device;
  int64_t stream;
  char* start;
  size_t size;
  std::set<int64_t> used_on; // other streams
  GraphPool* pool = nullptr;
};

struct DeviceState {
  int number = 0;       // on the host, whatever devices this process sees
  char* base = nullptr; // of the addresses that the host knows, where nothing is mapped
  ptrdiff_t offset = 0; // from there to the addresses that kernels use
  size_t reach = 0, capacity = 0, limit = 0;
  StreamState streams[kNumStreams];
  std::atomic<int64_t> next_stream[2]{0, 0}; // of each pool
  std::atomic<int> error{0};
  std::string message; // of the error
  std::atomic<bool> is_used{false};
  std::atomic<int64_t> ops_until_fault{-1}, allocations_until_oom{-1}, delay_us{0}, busy_us{0};
  std::atomic<std::thread::id> oom_thread; // whose allocations are counted

  std::mutex memory;                                       // guards all below, and the message
  std::map<char*, size_t> space;                           // addresses that no block has
  std::map<int64_t, std::multimap<size_t, Block*>> cached; // free blocks of each stream
  std::deque<std::pair<Block*, std::vector<MomentPtr>>> pending; // freed, but in use by streams
  c10::CachingDeviceAllocator::DeviceStats stats;
};

/// Time that an operator takes, beside its computing.
struct Duration {
  int64_t us = 0;
  bool computes = true; // false: it leaves its outputs as they are, and takes no core
};

// ---- devices.cpp
int num_devices();
DeviceState& device_at(int64_t index);
int current_device();
void set_device(int device);
int64_t current_stream(int device);
void set_stream(int device, int64_t stream);
int64_t take_stream(int device, bool is_high_priority);
bool is_forked();
[[noreturn]] void fail(int code, const std::string& message);
void break_device(DeviceState& device, int code, const std::string& message);
bool was_any_used();
/// Throws if the device is lost, or an operation before this one failed.
void check(int device);
/// Enqueues an operation. A lost device does not do it, and a graph that captures only notes it.
void submit(int device, int64_t stream, Task task, Duration duration = {});
/// Enqueues what is done even where the device is lost, so that nobody waits for ever.
void submit_always(int device, int64_t stream, Task task);
MomentPtr record(int device, int64_t stream);
void make_wait(int device, int64_t stream, const MomentPtr& moment);
bool is_idle(int device, int64_t stream);
void synchronize_stream(int device, int64_t stream);
void synchronize_device(int device);
void set_duration(const std::string& operator_name, Duration duration);
Duration duration_of(const std::string& operator_name);
/// Returns the device of an address that the host knows; -1 if it belongs to none.
int device_of(const void* address);
/// Returns where a kernel finds what the host knows by this address.
void* kernel_address(const void* address);

// ---- ledger.cpp: memory in use on each device of the host, over all processes
void note_use(int number);
bool reserve(int number, size_t bytes, size_t capacity);
void release(int number, size_t bytes);
size_t used_bytes(int number);

// ---- memory.cpp
c10::DeviceAllocator& allocator();

// ---- pinned.cpp
bool is_pinned(const void* address);
/// Keeps pinned memory from being used anew until the stream has come to this point.
void keep_pinned(const void* address, int device, int64_t stream);
void register_host(char* start, size_t bytes);
void unregister_host(char* start);
c10::Allocator* pinned_allocator();

// ---- graphs.cpp
/// Throws, and spoils the captures that are under way, where CUDA forbids a call during them.
void forbid_in_captures();
/// Notes a task if the stream is being captured. Returns false if it is not.
bool capture(DeviceState& device, int64_t stream, Task& task);
void note_in(Graph& graph, Task task); // never throws
std::multimap<size_t, Block*>& blocks_of(GraphPool& pool);
GraphPool* pool_of(Graph& graph);
bool is_capturing_here(); // in this thread

} // namespace sim
