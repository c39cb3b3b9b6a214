// The threads of a step, and their memory. Included by step_kernels.cpp only.
//
// The calling thread publishes a phase of `count` tiles. Every thread claims the tiles of a range of
// its own, in order, and then the last ones of other ranges. A phase ends when its tiles are done,
// not when all threads have arrived. So a thread whose core was taken away delays nobody, unless it
// holds a tile.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>

namespace {

constexpr int MOST_THREADS = 256;

using Tile = void (*)(void *context, int tile);

struct Pool {
  struct alignas(64) Range {
    std::atomic<uint64_t> ticket{0}; // phase (32 bits), end of the range (16), its next tile (16)
  } ranges[MOST_THREADS];
  alignas(64) std::atomic<uint32_t> done{0};
  uint64_t phase = 0;
  alignas(64) std::atomic<uint32_t> call{0}; // counts steps: sleeping threads wait for a change
  std::atomic<bool> stepping{false}; // only between steps may a thread sleep
  std::atomic<int> wanted{1}; // threads that may claim tiles, the caller included
  Tile tile = nullptr;
  void *context = nullptr;
  int started = 1;
  std::mutex one_step;
};

// Never freed: its threads use it until the process ends.
Pool &pool = *new Pool;

constexpr int SPINS = 4000; // some 200 us

inline void pause_core() {
#ifdef __aarch64__
  asm volatile("yield");
#else
  __builtin_ia32_pause();
#endif
}

bool claim(int number, int *tile) {
  const int threads = pool.wanted.load(std::memory_order_relaxed);
  for (int i = 0; i < threads; ++i) {
    auto &range = pool.ranges[(number + i) % threads].ticket;
    uint64_t ticket = range.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t next = ticket & 0xffff, end = (ticket >> 16) & 0xffff;
      if (next >= end)
        break;
      // Neighboring tiles are neighbors in memory, and what follows a tile was prefetched.
      const uint64_t left = i ? ticket - 0x10000 : ticket + 1;
      if (range.compare_exchange_weak(ticket, left, std::memory_order_acq_rel)) {
        *tile = int(i ? end - 1 : next);
        return true;
      }
    }
  }
  return false;
}

void *help(void *argument) {
  const int number = int(reinterpret_cast<intptr_t>(argument));
  int idle = 0;
  uint32_t seen = pool.call.load();
  for (;;) {
    int tile;
    if (number < pool.wanted.load(std::memory_order_relaxed) && claim(number, &tile)) {
      pool.tile(pool.context, tile);
      pool.done.fetch_add(1, std::memory_order_release);
      idle = 0;
    } else if (++idle < SPINS) {
      pause_core();
      if (idle == 1)
        seen = pool.call.load();
    } else if (pool.stepping.load(std::memory_order_relaxed)) {
      sched_yield();
    } else {
      pool.call.wait(seen);
      idle = 0;
    }
  }
  return nullptr;
}

// Threads for a step, or for a product alone, as long as this object lives.
struct Threads {
  std::lock_guard<std::mutex> lock{pool.one_step};
  explicit Threads(int threads) { wake(std::min(threads, MOST_THREADS)); }
  ~Threads() { pool.stepping.store(false); }
  static void wake(int threads);
};

void Threads::wake(int threads) {
  pool.wanted.store(threads);
  while (pool.started < threads) {
    pthread_t thread;
    void *number = reinterpret_cast<void *>(intptr_t(pool.started));
    if (pthread_create(&thread, nullptr, help, number))
      break; // the threads that exist do all the work
    pthread_detach(thread);
    ++pool.started;
  }
  pool.stepping.store(true);
  pool.call.fetch_add(1);
  pool.call.notify_all();
}

// Run work(0) to work(count - 1). `work` may not touch what another tile writes.
template <class Work> void phase(long total, Work &&work) {
  const long threads = pool.wanted.load(std::memory_order_relaxed);
  if (total == 1 || threads == 1) {
    for (long tile = 0; tile < total; ++tile)
      work(int(tile));
    return;
  }
  for (long first = 0; first < total; first += 0xffff) {
    long count = std::min(total - first, 0xffffL);
    auto shifted = [&](int tile) { work(int(first) + tile); };
    using Shifted = decltype(shifted);
    pool.tile = [](void *context, int tile) { (*static_cast<Shifted *>(context))(tile); };
    pool.context = &shifted;
    pool.done.store(0, std::memory_order_relaxed);
    ++pool.phase;
    for (long i = 0; i < threads; ++i) {
      const uint64_t begin = count * i / threads, end = count * (i + 1) / threads;
      pool.ranges[i].ticket.store(pool.phase << 32 | end << 16 | begin, std::memory_order_release);
    }
    int tile;
    while (claim(0, &tile)) {
      shifted(tile);
      pool.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; pool.done.load(std::memory_order_acquire) < count; ++spins) {
      pause_core();
      if (spins > SPINS)
        sched_yield();
    }
  }
}

// Ask for huge pages, before whole pages are written: fewer misses of the address cache.
inline void advise([[maybe_unused]] void *pages, [[maybe_unused]] size_t size) {
#ifdef MADV_HUGEPAGE
  madvise(pages, size, MADV_HUGEPAGE);
#endif
}

// Memory of a thread, or of the caller for a step. Grows, and is kept.
struct Scratch {
  char *memory = nullptr;
  size_t size = 0;
  char *get(size_t wanted) {
    if (wanted > size) {
      std::free(memory);
      size = (wanted + (2 << 20) - 1) & ~size_t((2 << 20) - 1);
      memory = static_cast<char *>(std::aligned_alloc(2 << 20, size));
      if (!memory)
        std::abort();
      advise(memory, size);
    }
    return memory;
  }
};

} // namespace
