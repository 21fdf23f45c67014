// The threads that run parallel loops of compiled code: a launch function with the interface of TVM's, and its pool.
//
// A loop is divided into several tasks for each thread. Every thread has a home, a run of neighbouring tasks that it does
// from the front; who is done with his own takes from the back of the others'. So threads that have a core each do halves
// that lie where their caches expect them, and a thread whose core is taken by somebody else leaves its work to the rest.
// The caller takes part, and only ever waits for tasks that are being run: a worker that does not come is not missed.
//
// One pool serves all callers of the process. Workers are started when a loop first wants them, sleep when there is
// nothing to do, and stay until the process ends: this library is never unmapped.

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <tvm/ffi/c_api.h>

extern "C" {
struct TVMParallelGroupEnv {
  void* sync_handle;  // for barriers, which there are none of
  int32_t num_task;
};
using Task = int (*)(int task, TVMParallelGroupEnv* group, void* data);
}

namespace {

constexpr int VERSION = 1;
// A launch that finds all slots taken is run by its caller alone.
constexpr int NUM_SLOTS = 64;
constexpr uint32_t MAX_HOMES = 64;
// A worker that finds nothing to do looks for so long before it sleeps: the loops of one run follow each other faster.
// In a virtual machine waking a core is work for its host; at half of this whole models are 2 to 7 % slower.
constexpr int64_t WORKER_SPIN_NS = 100'000;
// A caller looks for so long whether the last tasks are done before it sleeps and leaves them its core.
constexpr int64_t CALLER_SPIN_NS = 50'000;
constexpr int NUM_LOOKS = 32;  // between two questions to the clock
constexpr uint32_t WAITING = 1u << 31;

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Both return early for reasons of the system's own; callers look again.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(std::atomic<uint32_t>& word, int num_threads) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, num_threads, nullptr, nullptr, 0);
}

// Few threads share a loop of few tasks; many threads would find more tasks than a loop has steps.
int tasks_per_thread(int num_threads) { return num_threads <= 4 ? 8 : num_threads <= 16 ? 4 : 2; }

// Tasks [next, end) of a launch that nobody has taken: launch in the upper half, then next, then end. A thread that comes
// late, with the number of an earlier launch, changes nothing.
struct alignas(64) Home {
  std::atomic<uint64_t> tasks{0};

  void offer(uint32_t launch, uint64_t next, uint64_t end) {
    tasks.store(uint64_t{launch} << 32 | next << 16 | end, std::memory_order_release);
  }

  // The task taken, or -1.
  int take(uint32_t launch, bool from_front) {
    uint64_t seen = tasks.load(std::memory_order_acquire);
    for (;;) {
      const uint32_t next = seen >> 16 & 0xffff, end = seen & 0xffff;
      if (static_cast<uint32_t>(seen >> 32) != launch || next >= end) return -1;
      const uint64_t left = from_front ? seen + (1 << 16) : seen - 1;
      if (tasks.compare_exchange_weak(seen, left, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return static_cast<int>(from_front ? next : end - 1);
      }
    }
  }
};

// One loop that is being run. Memory of a slot is never given back, so that a late worker may look at it.
struct alignas(64) Slot {
  // Read by those alone who have taken a task, on which the caller waits.
  Task task = nullptr;
  void* data = nullptr;
  int32_t num_tasks = 0;
  TVMFFIObjectHandle error = nullptr;
  int code = 0;

  uint32_t launch = 0;
  std::atomic<uint32_t> num_homes{0};
  std::atomic<uint64_t> seats{0};  // launch in the upper half, then how many workers may still join
  alignas(64) std::atomic<uint32_t> num_left{0};  // tasks not done; WAITING is added by a caller that sleeps
  std::atomic<bool> failed{false};
  Home homes[MAX_HOMES];
};

Slot slots[NUM_SLOTS];
alignas(64) std::atomic<uint64_t> taken_slots{0};
alignas(64) std::atomic<uint64_t> open_slots{0};  // where a worker may find tasks
alignas(64) std::atomic<uint32_t> num_calls{0};  // what workers sleep on
std::atomic<uint32_t> num_sleepers{0};
alignas(64) std::atomic<int> num_looking{0};  // awake and without a loop: they look at the slots before they sleep
std::atomic<int> num_workers{0};
std::atomic<int> most_workers{INT_MAX};  // how many there were when the system last refused one
std::atomic<int> default_num_threads{1};
pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;

thread_local int own_num_threads = 0;
thread_local bool in_task = false;

void run_task(Slot& slot, int task) {
  if (slot.failed.load(std::memory_order_relaxed)) return;  // the launch has failed: what is left need not be done
  TVMParallelGroupEnv group{nullptr, slot.num_tasks};
  const int code = slot.task(task, &group, slot.data);
  if (code == 0) return;
  TVMFFIObjectHandle error = nullptr;  // lies in a variable of this thread; the caller's is to have it
  TVMFFIErrorMoveFromRaised(&error);
  if (!slot.failed.exchange(true)) {
    slot.code = code;
    slot.error = error;
  } else if (error != nullptr) {
    TVMFFIObjectDecRef(error);
  }
}

void work(Slot& slot, uint32_t launch, uint32_t home) {
  const uint32_t num_homes = slot.num_homes.load(std::memory_order_relaxed);
  uint32_t num_done = 0;
  in_task = true;
  for (uint32_t away = 0; away < num_homes; ++away) {
    Home& place = slot.homes[(home + away) % num_homes];
    for (int task; (task = place.take(launch, away == 0)) >= 0; ++num_done) run_task(slot, task);
  }
  in_task = false;
  // After this the slot may be another launch's, whose caller a late wake does not harm.
  if (num_done != 0 && slot.num_left.fetch_sub(num_done, std::memory_order_acq_rel) == (WAITING | num_done)) {
    wake(slot.num_left, INT_MAX);
  }
}

bool join(Slot& slot) {
  uint64_t seen = slot.seats.load(std::memory_order_acquire);
  do {
    if (static_cast<uint32_t>(seen) == 0) return false;
  } while (!slot.seats.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire));
  num_looking.fetch_sub(1);
  work(slot, seen >> 32, static_cast<uint32_t>(seen));
  num_looking.fetch_add(1);
  return true;
}

bool join_any() {
  bool joined = false;
  for (uint64_t open = open_slots.load(std::memory_order_acquire); open != 0; open &= open - 1) {
    joined |= join(slots[__builtin_ctzll(open)]);
  }
  return joined;
}

bool has_seats() {
  for (uint64_t open = open_slots.load(); open != 0; open &= open - 1) {
    if (static_cast<uint32_t>(slots[__builtin_ctzll(open)].seats.load()) != 0) return true;
  }
  return false;
}

void* run_worker(void*) {
  num_looking.fetch_add(1);
  for (;;) {
    const int64_t until = now_ns() + WORKER_SPIN_NS;
    bool joined = join_any();
    while (!joined && now_ns() < until) {
      for (int look = 0; look < NUM_LOOKS && !has_seats(); ++look) pause_briefly();
      joined = join_any();
    }
    if (joined) continue;
    // A caller opens its slot before it asks who looks and who sleeps; a sleeper is one, and looks no more, before it
    // looks a last time.
    const uint32_t seen = num_calls.load();
    num_looking.fetch_sub(1);
    num_sleepers.fetch_add(1);
    if (!has_seats()) sleep_while(num_calls, seen);
    num_sleepers.fetch_sub(1);
    num_looking.fetch_add(1);
  }
  return nullptr;
}

// Fewer threads than asked for are fine: a loop is finished by whoever is there.
void start_workers(int wanted) {
  pthread_mutex_lock(&starting);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are the process's business, and workers inherit this
  while (num_workers.load() < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, run_worker, nullptr) != 0) {
      most_workers = num_workers.load();  // not asked for again with every loop
      break;
    }
    pthread_setname_np(thread, "hone-parallel");
    pthread_detach(thread);
    num_workers.fetch_add(1);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_mutex_unlock(&starting);
}

// A child of fork has the memory and none of the workers.
void forget_workers() {
  pthread_mutex_init(&starting, nullptr);
  num_workers = 0;
  most_workers = INT_MAX;
  num_sleepers = 0;
  num_looking = 0;
  open_slots = 0;
  taken_slots = 0;
}

[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, forget_workers);

int run_alone(Task task, void* data, int num_tasks) {
  TVMParallelGroupEnv group{nullptr, num_tasks};
  for (int at = 0; at < num_tasks; ++at) {
    if (const int code = task(at, &group, data)) return code;
  }
  return 0;
}

int take_slot() {
  uint64_t taken = taken_slots.load(std::memory_order_relaxed);
  for (;;) {
    if (~taken == 0) return -1;
    const int at = __builtin_ctzll(~taken);
    if (taken_slots.compare_exchange_weak(taken, taken | uint64_t{1} << at, std::memory_order_acq_rel)) return at;
  }
}

void wait_for_others(Slot& slot) {
  const int64_t until = now_ns() + CALLER_SPIN_NS;
  do {
    for (int look = 0; look < NUM_LOOKS; ++look) {
      if (slot.num_left.load(std::memory_order_acquire) == 0) return;
      pause_briefly();
    }
  } while (now_ns() < until);
  for (;;) {
    const uint32_t seen = slot.num_left.fetch_or(WAITING, std::memory_order_acq_rel) | WAITING;
    if (seen == WAITING) return;
    sleep_while(slot.num_left, seen);
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int hone_parallel_version() { return VERSION; }

// Of every thread that has told no number of its own.
EXPORTED void hone_parallel_set_default(int num_threads) { default_num_threads = num_threads; }

// How many threads, itself included, run the calling thread's loops from now on.
EXPORTED void hone_parallel_set_threads(int num_threads) { own_num_threads = num_threads; }

EXPORTED int hone_parallel_num_workers() { return num_workers.load(); }

// See TVMBackendParallelLaunch: `num_task` is how often `task` is called, 0 for as often as the pool likes. Returns what
// the first task that failed returned, with its error raised here.
EXPORTED int hone_parallel_launch(Task task, void* data, int num_task) {
  const int num_threads = own_num_threads != 0 ? own_num_threads : default_num_threads.load(std::memory_order_relaxed);
  const int wanted = std::min(num_task != 0 ? num_task : num_threads * tasks_per_thread(num_threads), 0xffff);
  if (num_task > wanted || num_threads <= 1 || wanted == 1 || in_task) {
    return run_alone(task, data, num_task != 0 ? num_task : 1);
  }
  const int at = take_slot();
  if (at < 0) return run_alone(task, data, num_task != 0 ? num_task : 1);
  // As many as the process may use: several instances with a part of the threads each find workers of their own.
  const int workers = std::min(std::max(num_threads, default_num_threads.load(std::memory_order_relaxed)) - 1,
                               most_workers.load(std::memory_order_relaxed));
  if (num_workers.load(std::memory_order_relaxed) < workers) start_workers(workers);

  Slot& slot = slots[at];
  const uint64_t bit = uint64_t{1} << at;
  const uint32_t launch = ++slot.launch;
  const uint32_t num_homes = std::min<uint32_t>(num_threads, MAX_HOMES);
  slot.task = task;
  slot.data = data;
  slot.num_tasks = wanted;
  slot.error = nullptr;
  slot.code = 0;
  slot.failed.store(false, std::memory_order_relaxed);
  slot.num_left.store(wanted, std::memory_order_relaxed);
  slot.num_homes.store(num_homes, std::memory_order_relaxed);
  for (uint64_t home = 0; home < num_homes; ++home) {
    slot.homes[home].offer(launch, wanted * home / num_homes, wanted * (home + 1) / num_homes);
  }
  // Last: who has a seat of this launch sees its homes.
  slot.seats.store(uint64_t{launch} << 32 | static_cast<uint32_t>(num_threads - 1));
  open_slots.fetch_or(bit);
  const int missing = num_threads - 1 - num_looking.load();
  if (missing > 0 && num_sleepers.load() != 0) {
    num_calls.fetch_add(1);
    wake(num_calls, missing);
  }
  work(slot, launch, 0);
  open_slots.fetch_and(~bit);
  wait_for_others(slot);

  const bool failed = slot.failed.load(std::memory_order_relaxed);
  const int code = failed ? slot.code : 0;
  const TVMFFIObjectHandle error = slot.error;
  taken_slots.fetch_and(~bit, std::memory_order_release);
  if (failed && error != nullptr) {
    TVMFFIErrorSetRaised(error);
    TVMFFIObjectDecRef(error);
  }
  return code;
}

// Tasks are not run side by side for certain, so none may wait for another. No code that hone makes asks for this: its
// libraries are refused when they are linked. Going on would give wrong results.
EXPORTED int hone_parallel_barrier(int, TVMParallelGroupEnv*) {
  std::fputs("hone: compiled code has a barrier between the tasks of a parallel loop, which is not supported\n", stderr);
  std::abort();
}
