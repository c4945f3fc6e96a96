// Collectives in the background: one worker thread a group runs them in the order they were started.
//
// A small one needs no thread, and so no switch to it and back, which costs tens of microseconds: who starts it
// publishes its data, which is all that peers wait for, and who waits for it does the rest. If another task comes behind
// it, or somebody waits with a time limit, the worker does.
#include <errno.h>
#include <pthread.h>

#include <condition_variable>
#include <new>

#include "comm/collective_call.h"

struct NdTask {
  NdTask* next;
  NdArguments arguments;
  int code;
  bool begun;  // this rank's data is published
  bool done;
};

namespace nd {

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;  // a task is done
  std::condition_variable to_do;    // for the worker
  NdTask* first = nullptr;          // waiting or running
  NdTask** last = &first;
  bool has_worker = false;
  bool stop = false;
  bool running = false;  // `first` runs now
  pthread_t worker;
  std::atomic<pthread_t> runner{};  // who runs it
  std::atomic<int> num_tasks{0};
};

thread_local Stage stage = Stage::kWhole;

namespace {

int run_stage(NdGroup* g, const NdArguments& arguments, Stage part) {
  stage = part;
  const int code = nd_run(g, &arguments);
  stage = Stage::kWhole;
  return code;
}

// Whether a call takes one round.
bool is_small(const NdGroup& g, const NdArguments& a) {
  size_t bytes = a.count;
  switch (a.coll) {
    case ND_ALL_REDUCE:
    case ND_REDUCE:
    case ND_REDUCE_SCATTER:
      bytes *= element_bytes(a.dtype);
      break;
    case ND_ALL_GATHER:
    case ND_BROADCAST:
    case ND_SCATTER:
    case ND_GATHER:
      break;
    default:
      return false;
  }
  if (a.coll == ND_ALL_REDUCE && g.world > 2 && bytes > g.header->tuning.one_shot_bytes) return false;
  return g.world > 1 && bytes <= piece_bytes(g);
}

bool peers_arrived(NdGroup& g) {
  for (int p = 0; p < g.world; ++p)
    if (g.parts[p].control.flag.seq.value.load(std::memory_order_acquire) < g.seq) return false;
  return true;
}

// Run the first task on this thread. Called and left with the lock.
void run_first(NdGroup* g, std::unique_lock<std::mutex>& lock) {
  Queue& queue = *g->queue;
  NdTask* task = queue.first;
  queue.running = true;
  queue.runner.store(pthread_self(), std::memory_order_relaxed);  // only this thread looks for itself
  lock.unlock();
  const int code = run_stage(g, task->arguments, task->begun ? Stage::kFinish : Stage::kWhole);
  lock.lock();
  queue.running = false;
  queue.runner.store(pthread_t{}, std::memory_order_relaxed);
  queue.first = task->next;
  if (queue.first == nullptr) queue.last = &queue.first;
  task->code = code;
  task->done = true;
  queue.num_tasks.fetch_sub(1, std::memory_order_release);
  queue.changed.notify_all();
  if (queue.first != nullptr) queue.to_do.notify_one();
}

void* run_worker(void* argument) {
  NdGroup* g = static_cast<NdGroup*>(argument);
  Queue& queue = *g->queue;
  std::unique_lock<std::mutex> lock(queue.mutex);
  for (;;) {
    queue.to_do.wait(lock, [&] { return (queue.stop || queue.first != nullptr) && !queue.running; });
    if (queue.first == nullptr) return nullptr;
    run_first(g, lock);
  }
}

// Have the worker run what is in the queue. Called with the lock.
int call_worker(NdGroup* g) {
  Queue& queue = *g->queue;
  if (!queue.has_worker) {
    const int code = pthread_create(&queue.worker, nullptr, run_worker, g);
    if (code != 0) return -code;
    queue.has_worker = true;
  }
  queue.to_do.notify_one();
  return 0;
}

}  // namespace

int open_queue(NdGroup& g) {
  g.queue = new (std::nothrow) Queue;
  return g.queue == nullptr ? -ENOMEM : 0;
}

void close_queue(NdGroup& g) {
  if (g.queue == nullptr) return;
  // Calls still under way end now, on this rank; its peers see it leave.
  if (g.queue->num_tasks.load(std::memory_order_acquire) != 0) {
    const std::lock_guard<std::mutex> lock(*g.report_mutex);
    int running = 0;
    if (g.failed.compare_exchange_strong(running, -ECANCELED, std::memory_order_release))
      g.report = NdReport{-ECANCELED, g.rank, g.rank, 0, 0, NdCall{}, NdCall{}};
  }
  {
    std::unique_lock<std::mutex> lock(g.queue->mutex);
    while (g.queue->first != nullptr && !g.queue->running) run_first(&g, lock);
    g.queue->stop = true;
  }
  if (g.queue->has_worker) {
    g.queue->to_do.notify_one();
    pthread_join(g.queue->worker, nullptr);
  }
  delete g.queue;
  g.queue = nullptr;
}

void wait_for_queue(NdGroup& g) {
  Queue& queue = *g.queue;
  // acquire: pairs with the runner's release, so that what its calls wrote is seen.
  if (queue.num_tasks.load(std::memory_order_acquire) == 0) return;
  if (pthread_equal(queue.runner.load(std::memory_order_relaxed), pthread_self())) return;
  std::unique_lock<std::mutex> lock(queue.mutex);
  while (queue.first != nullptr) {
    if (queue.running)
      queue.changed.wait(lock);
    else
      run_first(&g, lock);
  }
}

}  // namespace nd

using namespace nd;

int nd_run(NdGroup* g, const NdArguments* arguments) {
  const NdArguments& a = *arguments;
  switch (a.coll) {
    case ND_BARRIER:
      return nd_barrier(g);
    case ND_ALL_REDUCE:
      return nd_all_reduce(g, a.in, a.out, a.count, a.dtype, a.op);
    case ND_ALL_GATHER:
      return nd_all_gather(g, a.in, a.outs, a.count, a.dtype);
    case ND_REDUCE_SCATTER:
      return nd_reduce_scatter(g, a.ins, a.out, a.count, a.dtype, a.op);
    case ND_BROADCAST:
      return nd_broadcast(g, a.out, a.count, a.dtype, a.root);
    case ND_SCATTER:
      return nd_scatter(g, a.ins, a.out, a.count, a.dtype, a.root);
    case ND_GATHER:
      return nd_gather(g, a.in, a.outs, a.count, a.dtype, a.root);
    case ND_REDUCE:
      return nd_reduce(g, a.in, a.out, a.count, a.dtype, a.op, a.root);
    case ND_ALL_TO_ALL:
      return nd_all_to_all(g, a.ins, a.in_bytes, a.outs, a.out_bytes, a.dtype);
    default:
      return -EINVAL;
  }
}

int nd_task_start(NdGroup* g, const NdArguments* arguments, NdTask** out) {
  if (g->magic != kMagic) return -ECHILD;
  auto* task = new (std::nothrow) NdTask{nullptr, *arguments, 0, false, false};
  if (task == nullptr) return -ENOMEM;
  Queue& queue = *g->queue;
  const std::lock_guard<std::mutex> lock(queue.mutex);
  // A call that cannot begin, be it that it is wrong, fails when it is run.
  if (queue.first == nullptr && is_small(*g, *arguments))
    task->begun = run_stage(g, *arguments, Stage::kBegin) == 0;
  if (!task->begun)
    if (const int code = call_worker(g)) {
      delete task;
      return code;
    }
  *queue.last = task;
  queue.last = &task->next;
  queue.num_tasks.fetch_add(1, std::memory_order_release);
  *out = task;
  return 0;
}

int nd_task_wait(NdGroup* g, NdTask* task, uint64_t timeout_ns, int* code) {
  if (g->magic != kMagic) return -ECHILD;
  Queue& queue = *g->queue;
  std::unique_lock<std::mutex> lock(queue.mutex);
  const auto done = [&] { return task->done; };
  if (timeout_ns != ND_FOREVER) {
    if (!done() && !queue.running && queue.first->begun && peers_arrived(*g)) run_first(g, lock);
    if (!done())
      if (const int failed = call_worker(g)) return failed;
    if (!queue.changed.wait_for(lock, std::chrono::nanoseconds(timeout_ns), done)) return -ETIMEDOUT;
  }
  while (!task->done) {
    if (queue.running)
      queue.changed.wait(lock);
    else
      run_first(g, lock);
  }
  *code = task->code;
  return 0;
}

int nd_task_free(NdGroup* g, NdTask* task) {
  if (g->magic != kMagic) return -ECHILD;
  const std::lock_guard<std::mutex> lock(g->queue->mutex);
  if (!task->done) return -EBUSY;
  delete task;
  return 0;
}
