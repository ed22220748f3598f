// A loop over tasks whose work is divided among the calling thread and a thread pool.
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

// A thread pool, reduced to what parallel_for() needs.
struct Workers {
  int64_t threads = 1;
  std::function<void(std::function<void()>)> schedule;
};

// Calls body(task) once for each task in [0, tasks), in any order and on several threads. It returns when all tasks are
// done, and rethrows the first exception. The calling thread works too, and waits only for tasks that another thread
// has begun, so that a handler cannot deadlock when all other threads of its pool are busy.
template <class Body>
void parallel_for(const Workers& workers, int64_t tasks, const Body& body) {
  const int64_t helpers = std::min(workers.threads, tasks) - 1;
  if (helpers <= 0) {
    for (int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }

  // A helper may start after this call has returned. It then finds no task left, and touches only `state`, which it
  // co-owns.
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
    // The pool took fewer helpers than asked for; the other threads do their tasks.
  }
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == tasks; });
  if (state->error) std::rethrow_exception(state->error);
}

}  // namespace jaxgpuops
