// Graphs: what a stream was given during a capture, to be done again.
#pragma once
#include "runtime.h"

namespace sim {

enum class CaptureMode : int64_t { kGlobal, kThreadLocal, kRelaxed };

struct GraphPool {
  c10::MempoolId_t id;
  std::multimap<size_t, Block*> blocks; // free ones
  int num_graphs = 0;
};

struct Graph {
  ~Graph() { reset(); }
  void begin(uint64_t pool, CaptureMode mode);
  void end();
  void replay();
  void reset();

  GraphPool* pool = nullptr;
  CaptureMode mode = CaptureMode::kGlobal;
  std::thread::id thread;
  std::atomic<bool> is_spoilt{false};

 private:
  friend void note_in(Graph&, Task);
  std::vector<Task> tasks_;
  int device_ = 0;
  int64_t stream_ = 0;
  bool is_ready_ = false, is_under_way_ = false;
};
} // namespace sim
