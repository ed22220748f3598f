// A loop over tasks, shared between the calling thread and a pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

namespace jaxgpuops {

// A pool of threads, as much of it as the loop needs.
struct Workers {
  int64_t threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

// Calls body(task) once for each task in [0, tasks), in any order, on several threads; returns when all are done and
// rethrows the first exception. The calling thread works too, and waits only for tasks that some thread has begun: a
// handler that itself runs on a pool whose other threads are all busy cannot deadlock.
template <class Body>
void parallel_for(const Workers& workers, int64_t tasks, const Body& body) {
  const int64_t helpers = std::min(workers.threads, tasks) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }

  // Helpers may start after this call has returned: they own what they touch, and find no task left.
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
    std::exception_ptr error;
  };
  const auto state = std::make_shared<State>();
  const auto work = [state, tasks, &body] {
    int64_t done = 0;
    std::exception_ptr error;
    for (int64_t task; (task = state->next.fetch_add(1)) < tasks; ++done) {
      try {
        if (!error) body(task);
      } catch (...) {
        error = std::current_exception();
      }
    }
    if (done == 0) return;
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->done += done;
    if (error && !state->error) state->error = error;
    if (state->done == tasks) state->all_done.notify_all();
  };
  try {
    for (int64_t i = 0; i < helpers; ++i) workers.schedule(work);
  } catch (...) {
    // The pool took fewer helpers than asked for; the tasks get done all the same.
  }
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == tasks; });
  if (state->error) std::rethrow_exception(state->error);
}

}  // namespace jaxgpuops
