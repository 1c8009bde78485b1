// The threads that run a pass together, and the memory they use.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

struct Barrier {
  std::atomic<int> waiting{0}, phase{0};
  int threads = 1;
  void wait() {
    if (threads == 1) return;
    int now = phase.load(std::memory_order_acquire);
    if (waiting.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      waiting.store(0, std::memory_order_relaxed);
      phase.store(now + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase.load(std::memory_order_acquire) == now; spins++) {
      if (spins > 4000) {
        sched_yield();  // somebody else needs this core
      } else {
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    }
  }
};

struct Team {  // one of the threads that run a pass together
  int thread, threads;
  Barrier* barrier;
  int64_t first(int64_t work) const { return work * thread / threads; }
  int64_t last(int64_t work) const { return work * (thread + 1) / threads; }
  void wait() const { barrier->wait(); }
};

struct Arena {  // memory handed out piece by piece; without a base it only counts
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t count) {
    int64_t at = used;
    used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    return (T*)(base + at);
  }
};

// Runs body(team, arena) on all threads, over memory that is kept for the next pass.
template <class Measure, class Body>
static void together(int threads, Measure measure, Body body) {
  thread_local std::vector<char> memory;
  Arena size{nullptr};
  measure(size);
  if ((int64_t)memory.size() < size.used + 64) memory.resize(size.used + 64);
  char* base = memory.data() + (64 - (uintptr_t)memory.data() % 64) % 64;
  Barrier barrier;
#pragma omp parallel num_threads(threads)
  {
#pragma omp single
    barrier.threads = omp_get_num_threads();
    body(Team{omp_get_thread_num(), barrier.threads, &barrier}, Arena{base});
  }
}
