// Which blocks of 16 slots the rows of a step see, and which rows attend together.
//
// Rows that see nearly the same slots share the work of reading keys and values; rows of different requests see
// different slots and go apart. What a row computes does not depend on it.
#pragma once
#include <atomic>
#include <cstring>

#include "kernels.h"
#include "scratch.h"

namespace spaceport {

class VisibleBlocks {
public:
  explicit VisibleBlocks(const Attention& a)
      : blocks((a.seen + SLOT_BLOCK - 1) / SLOT_BLOCK),
        memory(a.rows * (sizeof(AttentionGroup) + blocks * sizeof(int32_t)) + 2 * size_t(blocks)),
        out_of_memory(memory.failed()) {
    if (out_of_memory) return;
    share = a.heads / a.cache.heads, kv_heads = a.cache.heads;
    all = reinterpret_cast<AttentionGroup*>(memory.data());
    int32_t* list = reinterpret_cast<int32_t*>(memory.data() + size_t(a.rows) * sizeof(AttentionGroup));
    uint8_t* together = reinterpret_cast<uint8_t*>(list + int64_t(a.rows) * blocks);  // blocks of the group so far
    uint8_t* own = together + blocks;                                                 // of the next row
    memset(together, 0, blocks);
    AttentionGroup group = {0, 0, 0, list, 0};
    int each = a.rows / a.cache.requests;  // rows of a request
    for (int row = 0; row < a.rows; row++) {
      int own_count = mark(a, row, own), joint = group.block_count;
      for (int b = 0; b < blocks; b++) joint += own[b] && !together[b];
      if (group.rows && (row % each == 0 || !joins(group, joint, own_count))) {
        list = finish(group, together, list);
        memset(together, 0, blocks);
        group = {row / each, row, 0, list, 0};
        joint = own_count;
      }
      for (int b = 0; b < blocks; b++) together[b] |= own[b];
      group.block_count = joint;
      group.rows++;
    }
    finish(group, together, list);
  }

  int groups() const { return count; }
  const AttentionGroup& group(int i) const { return all[i]; }
  bool failed() const { return out_of_memory.load(); }
  void fail() { out_of_memory.store(true); }

  // About what attention takes on one thread: a pair of row and head 35 ns for each block, a KV head 150 (Zen 4).
  int64_t work_ns() const {
    int64_t ns = 0;
    for (int i = 0; i < count; i++) ns += int64_t(all[i].block_count) * kv_heads * (35 * all[i].rows * share + 150);
    return ns;
  }

private:
  static constexpr int MOST_PAIRS = 64;   // of a group: their scores should stay in the second-level cache
  static constexpr int SHARED_PAIRS = 6;  // reading a block of keys and values costs as much as so many pairs

  int mark(const Attention& a, int row, uint8_t* own) const {
    const uint8_t* visible = a.visible + int64_t(row) * a.seen;
    int marked = 0;
    for (int b = 0; b < blocks; b++) {
      uint64_t halves[2] = {};
      int left = a.seen - b * SLOT_BLOCK;
      memcpy(halves, visible + b * SLOT_BLOCK, size_t(left < SLOT_BLOCK ? left : SLOT_BLOCK));
      own[b] = (halves[0] | halves[1]) != 0;
      marked += own[b];
    }
    return marked;
  }

  // Whether a row costs less within the group than by itself.
  bool joins(const AttentionGroup& group, int joint, int own) const {
    if ((group.rows + 1) * share > MOST_PAIRS) return false;
    int64_t with = int64_t(joint) * ((group.rows + 1) * share + SHARED_PAIRS);
    int64_t apart =
        int64_t(group.block_count) * (group.rows * share + SHARED_PAIRS) + int64_t(own) * (share + SHARED_PAIRS);
    return with <= apart;
  }

  int32_t* finish(const AttentionGroup& group, const uint8_t* together, int32_t* list) {
    for (int b = 0; b < blocks; b++)
      if (together[b]) *list++ = b;
    all[count++] = group;
    return list;
  }

  int blocks, share = 1, kv_heads = 1, count = 0;
  Scratch memory;
  AttentionGroup* all = nullptr;
  std::atomic<bool> out_of_memory;
};

}  // namespace spaceport
