// What `torch.sim` and tests ask for, as operators of `torch.ops.sim`.
#include "graphs.h"

#include <torch/library.h>

#include <unordered_map>

namespace sim {
namespace {

/// Things that Python knows by a number.
template <class T>
class Numbered {
 public:
  int64_t add(T thing) {
    std::lock_guard lock(mutex_);
    things_[next_] = std::move(thing);
    return next_++;
  }
  T at(int64_t number) {
    std::lock_guard lock(mutex_);
    return things_.at(number);
  }
  T take(int64_t number) {
    std::lock_guard lock(mutex_);
    T thing = things_.at(number);
    things_.erase(number);
    return thing;
  }

 private:
  std::mutex mutex_;
  int64_t next_ = 1;
  std::unordered_map<int64_t, T> things_;
};
auto& graphs = *new Numbered<std::shared_ptr<Graph>>;
auto& gates = *new Numbered<MomentPtr>;

int64_t hold(int64_t device, int64_t stream) {
  auto gate = std::make_shared<Moment>();
  device_at(device).streams[stream].push(int(device), [gate] { gate->wait(); });
  return gates.add(gate);
}
void let_go(int64_t gate) { gates.take(gate)->finish(); }
void busy(int64_t device, int64_t stream, double us) {
  submit(int(device), stream, [] {}, {int64_t(us), false});
}

/// As cudaLaunchHostFunc.
void launch_host(int64_t device, int64_t stream, int64_t function, int64_t argument) {
  submit(int(device), stream,
      [call = reinterpret_cast<void (*)(int64_t)>(function), argument] { call(argument); });
}

bool was_used() {
  return was_any_used(); // does not look for the devices, of which a process may yet hide some
}
void lose(int64_t device) {
  break_device(device_at(device), kUnknown, "sim error: device is lost");
}
void revive(int64_t device) {
  auto& state = device_at(device);
  state.error = 0;
  state.ops_until_fault = state.allocations_until_oom = -1;
}
void fault_after(int64_t device, int64_t count) { device_at(device).ops_until_fault = count; }
void out_of_memory_after(int64_t device, int64_t count) {
  auto& state = device_at(device);
  state.oom_thread = std::this_thread::get_id(); // others may compute at the same time
  state.allocations_until_oom = count;
}
void set_delay_us(int64_t device, int64_t us) { device_at(device).delay_us = us; }
void set_duration_us(const std::string& name, int64_t us, bool computes) {
  set_duration(name, {us, computes});
}
int64_t busy_us(int64_t device) { return device_at(device).busy_us; }
void limit_memory(int64_t device, double share) {
  auto& state = device_at(device);
  state.limit = size_t(double(state.capacity) * share);
}
std::tuple<int64_t, int64_t> memory_info(int64_t device) {
  auto [free, total] = allocator().getMemoryInfo(c10::DeviceIndex(device));
  return {int64_t(free), int64_t(total)};
}
int64_t number_of(int64_t device) { return device_at(device).number; }
int64_t capacity(int64_t device) { return int64_t(device_at(device).capacity); }

int64_t capture_begin(int64_t pool, int64_t mode) {
  auto graph = std::make_shared<Graph>();
  graph->begin(uint64_t(pool), CaptureMode(mode));
  return graphs.add(graph);
}
int64_t graph_pool(int64_t graph) { return int64_t(graphs.at(graph)->pool->id.second); }
bool is_stream_capturing(int64_t device, int64_t stream) {
  return device_at(device).streams[stream].graph != nullptr;
}

/// Wait for all streams before the process ends; not for ever, since one may be held.
void drain(double timeout_s) {
  if (is_forked() || !was_used()) return;
  auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (int i = 0; i < num_devices(); i++)
    for (auto& stream : device_at(i).streams) {
      std::unique_lock lock(stream.mutex);
      stream.idle.wait_until(lock, std::chrono::time_point_cast<std::chrono::nanoseconds>(until),
          [&] { return stream.num_completed == stream.num_submitted; });
    }
}
} // namespace
} // namespace sim

TORCH_LIBRARY(sim, m) {
  m.def("hold(int device, int stream) -> int", &sim::hold);
  m.def("let_go(int gate) -> ()", &sim::let_go);
  m.def("busy(int device, int stream, float us) -> ()", &sim::busy);
  m.def("launch_host(int device, int stream, int function, int argument) -> ()", &sim::launch_host);
  m.def("kernel_address(int address) -> int", [](int64_t address) {
    return reinterpret_cast<int64_t>(sim::kernel_address(reinterpret_cast<void*>(address)));
  });
  m.def("was_used() -> bool", &sim::was_used);
  m.def("is_forked() -> bool", &sim::is_forked);
  m.def("num_devices() -> int", [] { return int64_t(sim::num_devices()); });
  m.def("number_of(int device) -> int", &sim::number_of);
  m.def("capacity(int device) -> int", &sim::capacity);
  m.def("lose(int device) -> ()", &sim::lose);
  m.def("revive(int device) -> ()", &sim::revive);
  m.def("fault_after(int device, int count) -> ()", &sim::fault_after);
  m.def("out_of_memory_after(int device, int count) -> ()", &sim::out_of_memory_after);
  m.def("set_delay_us(int device, int us) -> ()", &sim::set_delay_us);
  m.def("set_duration_us(str name, int us, bool computes) -> ()", &sim::set_duration_us);
  m.def("busy_us(int device) -> int", &sim::busy_us);
  m.def("limit_memory(int device, float share) -> ()", &sim::limit_memory);
  m.def("memory_info(int device) -> (int, int)", &sim::memory_info);
  m.def("register_host(int address, int bytes) -> ()", [](int64_t address, int64_t bytes) {
    sim::register_host(reinterpret_cast<char*>(address), size_t(bytes));
  });
  m.def("unregister_host(int address) -> ()",
      [](int64_t address) { sim::unregister_host(reinterpret_cast<char*>(address)); });
  m.def("capture_begin(int pool, int mode) -> int", &sim::capture_begin);
  m.def("capture_end(int graph) -> ()", [](int64_t graph) { sim::graphs.at(graph)->end(); });
  m.def("replay(int graph) -> ()", [](int64_t graph) { sim::graphs.at(graph)->replay(); });
  m.def("graph_pool(int graph) -> int", &sim::graph_pool);
  m.def("forget_graph(int graph) -> ()", [](int64_t graph) { sim::graphs.take(graph)->reset(); });
  m.def("is_stream_capturing(int device, int stream) -> bool", &sim::is_stream_capturing);
  m.def("drain(float timeout_s) -> ()", &sim::drain);
}
