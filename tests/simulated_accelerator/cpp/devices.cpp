// Devices, the threads that are their streams, and events.
#include "runtime.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <cstdlib>
#include <cstring>
#include <shared_mutex>
#include <sstream>
#include <unordered_map>

namespace at {
TORCH_API void set_num_threads(int);
}

namespace sim {
namespace {

std::atomic<bool> forked{false}, was_used{false};
thread_local int this_device = 0;
thread_local std::vector<int64_t> these_streams;

int64_t from_env(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

/// The devices that this process sees, by their numbers on the host.
std::vector<int> visible_devices() {
  int64_t count = std::min<int64_t>(from_env("SIM_DEVICES", 4), kMaxDevices);
  std::vector<int> found;
  const char* visible = std::getenv("SIM_VISIBLE_DEVICES");
  if (!visible) {
    for (int i = 0; i < count; i++) found.push_back(i);
    return found;
  }
  std::istringstream names(visible);
  for (std::string name; std::getline(names, name, ',');) {
    size_t dash = name.rfind('-'); // a UUID ends with the number
    int number = std::atoi(name.c_str() + (dash == std::string::npos ? 0 : dash + 1));
    if (name.empty() || number < 0 || number >= count) break; // CUDA, too, ignores the rest
    found.push_back(number);
  }
  return found;
}

DeviceState* make_device(int number) {
  auto* device = new DeviceState;
  device->number = number;
  device->capacity = device->limit = size_t(from_env("SIM_CAPACITY_MB", 1024)) << 20;
  device->delay_us = from_env("SIM_DELAY_US", 0);
  device->reach = device->capacity * 4;
  auto map = [&](int access) {
    void* at =
        mmap(nullptr, device->reach, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "there is no address space for a simulated device");
    return static_cast<char*>(at);
  };
  // The host knows addresses where nothing is; kernels use a second mapping, a fixed way off.
  device->base = map(PROT_NONE);
  device->offset = map(PROT_READ | PROT_WRITE) - device->base;
  device->space[device->base] = device->reach;
  return device;
}

std::vector<DeviceState*>& devices() {
  static auto& all = *[] {
    auto* made = new std::vector<DeviceState*>;
    for (int number : visible_devices()) made->push_back(make_device(number));
    pthread_atfork(nullptr, nullptr, [] { forked = was_used.load(); });
    return made;
  }();
  return all;
}

void run_stream(int device, StreamState& stream) {
  this_device = device;
  prctl(PR_SET_TIMERSLACK, 1); // durations are short
  at::set_num_threads(int(from_env("SIM_THREADS", 1)));
  c10::InferenceMode mode;
  for (;;) {
    StreamState::Entry entry;
    {
      std::unique_lock lock(stream.mutex);
      stream.more.wait(lock, [&] { return !stream.entries.empty(); });
      entry = std::move(stream.entries.front());
      stream.entries.pop_front();
    }
    entry.task();
    entry.task = nullptr;
    std::lock_guard lock(stream.mutex);
    stream.num_completed++;
    if (entry.end) entry.end->finish(); // who has waited for it finds the stream idle
    stream.idle.notify_all();
  }
}

void sleep_us(int64_t us) {
  if (us > 0) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void run_operation(DeviceState& device, const Task& task, Duration duration) {
  sleep_us(device.delay_us);
  if (device.error) return;
  if (device.ops_until_fault >= 0 && device.ops_until_fault.fetch_sub(1) == 0) {
    break_device(device, kIllegalAccess, "sim error: an illegal memory access was encountered");
    return;
  }
  auto begin = std::chrono::steady_clock::now();
  std::string problem;
  try {
    sleep_us(duration.us);
    if (duration.computes) task();
  } catch (const c10::Error& error) {
    problem = error.what_without_backtrace();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  device.busy_us += std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::steady_clock::now() - begin)
                        .count();
  if (!problem.empty())
    break_device(
        device, kAssert, "sim error: device-side assert triggered: " + problem.substr(0, 300));
}

struct Durations {
  std::shared_mutex mutex;
  std::unordered_map<std::string, Duration> of_operators;
  std::atomic<bool> is_empty{true};
};
Durations& durations() {
  static auto& all = *new Durations;
  return all;
}
} // namespace

void Moment::finish() {
  std::lock_guard lock(mutex_);
  at = std::chrono::steady_clock::now();
  is_done_ = true;
  changed_.notify_all();
}
void Moment::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_done_; });
}
bool Moment::is_done() {
  std::lock_guard lock(mutex_);
  return is_done_;
}

void StreamState::push(int device, Task task, MomentPtr end) {
  std::lock_guard lock(mutex);
  if (!is_started) {
    is_started = true;
    std::thread(run_stream, device, std::ref(*this)).detach();
  }
  entries.push_back({std::move(task), std::move(end)});
  num_submitted++;
  more.notify_one();
}
void StreamState::wait_until_idle() {
  std::unique_lock lock(mutex);
  idle.wait(lock, [this, upto = num_submitted] { return num_completed >= upto; });
}

int num_devices() { return int(devices().size()); }
DeviceState& device_at(int64_t index) {
  TORCH_CHECK(index >= 0 && index < num_devices(), "sim error: invalid device ordinal ", index);
  return *devices()[index];
}
int current_device() { return this_device; }
void set_device(int device) {
  device_at(device);
  this_device = device;
}
int64_t current_stream(int device) {
  return size_t(device) < these_streams.size() ? these_streams[device] : 0;
}
void set_stream(int device, int64_t stream) {
  these_streams.resize(devices().size(), 0);
  these_streams.at(device) = stream;
}
int64_t take_stream(int device, bool is_high_priority) {
  int64_t taken = device_at(device).next_stream[is_high_priority]++;
  return 1 + (is_high_priority ? kPoolSize : 0) + taken % kPoolSize;
}
bool is_forked() { return forked; }

void fail(int code, const std::string& message) {
  throw c10::AcceleratorError({__func__, __FILE__, uint32_t(__LINE__)}, code, message);
}
void break_device(DeviceState& device, int code, const std::string& message) {
  std::lock_guard lock(device.memory);
  if (device.error) return;
  device.message = message;
  device.error = code;
}
bool was_any_used() { return was_used; }
void check(int device) {
  TORCH_CHECK(!forked,
      "Cannot re-initialize sim in forked subprocess. To use sim with "
      "multiprocessing, you must use the 'spawn' start method");
  auto& state = device_at(device);
  if (!state.is_used.exchange(true)) {
    was_used = true;
    note_use(state.number);
  }
  if (int code = state.error) fail(code, state.message);
}

void submit(int device, int64_t stream, Task task, Duration duration) {
  submit_always(device, stream, [&state = device_at(device), task = std::move(task), duration] {
    run_operation(state, task, duration);
  });
}
void submit_always(int device, int64_t stream, Task task) {
  check(device);
  auto& state = device_at(device);
  if (!capture(state, stream, task)) state.streams[stream].push(device, std::move(task));
}
MomentPtr record(int device, int64_t stream) {
  auto moment = std::make_shared<Moment>();
  auto& state = device_at(device).streams[stream];
  if (Graph* graph = state.graph) {
    moment->captured = graph;
    submit_always(device, stream, [moment] { moment->finish(); });
  } else {
    check(device);
    state.push(device, [] {}, moment);
  }
  return moment;
}
void make_wait(int device, int64_t stream, const MomentPtr& moment) {
  Graph* graph = device_at(device).streams[stream].graph;
  if (graph != moment->captured) // CUDA lets other streams join a capture; nobody here needs it
    fail(kCaptureUnsupported, "sim error: dependency created on uncaptured work in another stream");
  if (!graph) submit_always(device, stream, [moment] { moment->wait(); });
}
bool is_idle(int device, int64_t stream) {
  check(device);
  auto& state = device_at(device).streams[stream];
  if (state.graph) forbid_in_captures();
  std::lock_guard lock(state.mutex);
  return state.num_completed == state.num_submitted;
}
void synchronize_stream(int device, int64_t stream) {
  check(device);
  auto& state = device_at(device).streams[stream];
  if (state.graph) forbid_in_captures();
  state.wait_until_idle();
  check(device);
}
void synchronize_device(int device) {
  check(device);
  forbid_in_captures();
  for (auto& stream : device_at(device).streams) stream.wait_until_idle();
  check(device);
}

void set_duration(const std::string& operator_name, Duration duration) {
  std::unique_lock lock(durations().mutex);
  durations().of_operators[operator_name] = duration;
  durations().is_empty = false;
}
Duration duration_of(const std::string& operator_name) {
  if (durations().is_empty) return {};
  std::shared_lock lock(durations().mutex);
  auto found = durations().of_operators.find(operator_name);
  return found == durations().of_operators.end() ? Duration{} : found->second;
}

int device_of(const void* address) {
  for (int i = 0; i < num_devices(); i++) {
    auto from_base = static_cast<const char*>(address) - devices()[i]->base;
    if (from_base >= 0 && size_t(from_base) < devices()[i]->reach) return i;
  }
  return -1;
}
void* kernel_address(const void* address) {
  int device = device_of(address);
  auto* found = static_cast<char*>(const_cast<void*>(address));
  return device < 0 ? found : found + devices()[device]->offset;
}
} // namespace sim
