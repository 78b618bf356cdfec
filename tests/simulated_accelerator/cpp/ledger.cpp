// Memory in use on each device of the host. Processes that name the same file share the devices.
//
// Each process has a slot in the file, and a lock on the slot's byte of a second range. The kernel
// drops the lock when the process dies, however that happens, so its memory counts as returned.
#include "runtime.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

namespace sim {
namespace {

constexpr int kNumSlots = 256;
constexpr off_t kFloor =
    1 << 20; // the byte that is locked for changes; slot i locks kFloor + 1 + i

struct Slot { // fake_nvml.py reads it
  std::atomic<int64_t> pid;
  std::atomic<uint64_t> devices; // one bit for each that the process uses
  std::atomic<uint64_t> bytes[kMaxDevices];
  uint64_t unused[14];
};
static_assert(sizeof(Slot) == 256);

class Ledger {
 public:
  Ledger() {
    const char* path = std::getenv("SIM_SHARED");
    size_t size = sizeof(Slot) * kNumSlots;
    if (path && *path) {
      file_ = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
      TORCH_CHECK(
          file_ >= 0 && ftruncate(file_, off_t(size)) == 0, "SIM_SHARED=", path, " cannot be used");
    }
    void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE,
        file_ < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file_, 0);
    TORCH_CHECK(at != MAP_FAILED, "the ledger of the simulated devices cannot be mapped");
    slots_ = static_cast<Slot*>(at);
    if (file_ < 0) mine_ = slots_;
    for (int i = 0; !mine_ && i < kNumSlots; i++)
      if (lock(kFloor + 1 + i, F_SETLK)) mine_ = &slots_[i];
    TORCH_CHECK(mine_, "more than ", kNumSlots, " processes share SIM_SHARED");
    mine_->devices = 0;
    for (auto& bytes : mine_->bytes) bytes = 0;
    mine_->pid = getpid();
  }

  void note_use(int number) { mine_->devices |= uint64_t(1) << number; }

  bool reserve(int number, size_t bytes, size_t capacity) {
    std::lock_guard hold(mutex_);
    if (file_ >= 0) lock(kFloor, F_SETLKW);
    bool fits = used(number) + bytes <= capacity;
    if (fits) mine_->bytes[number] += bytes;
    if (file_ >= 0) unlock(kFloor);
    return fits;
  }
  void release(int number, size_t bytes) { mine_->bytes[number] -= bytes; }

  size_t used(int number) {
    size_t sum = 0;
    for (int i = 0; i < (file_ < 0 ? 1 : kNumSlots); i++)
      if (slots_[i].bytes[number] && (&slots_[i] == mine_ || is_held(i)))
        sum += slots_[i].bytes[number];
    return sum;
  }

 private:
  bool lock(off_t byte, int how) {
    struct flock range {
      F_WRLCK, SEEK_SET, byte, 1, 0
    };
    return fcntl(file_, how, &range) == 0;
  }
  void unlock(off_t byte) {
    struct flock range {
      F_UNLCK, SEEK_SET, byte, 1, 0
    };
    fcntl(file_, F_SETLK, &range);
  }
  bool is_held(int slot) {
    struct flock range {
      F_WRLCK, SEEK_SET, kFloor + 1 + slot, 1, 0
    };
    return fcntl(file_, F_GETLK, &range) == 0 && range.l_type != F_UNLCK;
  }

  std::mutex mutex_;
  int file_ = -1; // never closed: the locks would go
  Slot* slots_ = nullptr;
  Slot* mine_ = nullptr;
};

Ledger& ledger() {
  static auto& one = *new Ledger;
  return one;
}
} // namespace

void note_use(int number) { ledger().note_use(number); }
bool reserve(int number, size_t bytes, size_t capacity) {
  return ledger().reserve(number, bytes, capacity);
}
void release(int number, size_t bytes) { ledger().release(number, bytes); }
size_t used_bytes(int number) { return ledger().used(number); }
} // namespace sim
