// Memory for the time of one computation, kept for the next one.
//
// Sessions run steps one after the other, often hundreds in a second: to allocate megabytes for each operator would
// cost page faults. Any thread may take and give back.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace spaceport {

class Scratch {
public:
  explicit Scratch(size_t bytes) {
    size_t needed = bytes + sizeof(Head) + 64;
    for (std::atomic<Head*>& place : kept) {
      if (!place.load(std::memory_order_relaxed)) continue;
      head = place.exchange(nullptr);
      if (head && head->bytes >= needed) return;
      free(head);
      head = nullptr;
    }
    size_t rounded = needed + needed / 4;  // steps grow slowly
    head = static_cast<Head*>(malloc(rounded));
    if (head) head->bytes = rounded;
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (head && head->bytes <= MOST_KEPT)
      for (std::atomic<Head*>& place : kept) {
        Head* none = nullptr;
        if (place.compare_exchange_strong(none, head)) return;
      }
    free(head);
  }

  bool failed() const { return !head; }

  // Begins at a multiple of 64 bytes.
  uint8_t* data() const {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(head + 1) + 63) & ~uintptr_t(63));
  }

private:
  struct Head {
    size_t bytes;
  };
  static constexpr size_t MOST_KEPT = size_t(64) << 20;
  static inline std::atomic<Head*> kept[16] = {};
  Head* head = nullptr;
};

// The next bytes of scratch memory.
inline uint8_t* take(uint8_t*& at, int64_t bytes) {
  uint8_t* p = at;
  at += (bytes + 63) / 64 * 64;
  return p;
}

}  // namespace spaceport
