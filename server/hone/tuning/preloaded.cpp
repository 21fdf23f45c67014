// Loaded into the compilers and linkers that the tuning child starts: their first thread yields while it runs, as the
// child's own threads do (yielding.py says why). A program that waits for another one is left alone, nearly.

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr int NOTIFY_THREAD = 4;
// Between two signals: of a thread that computes, and of one that hardly ran since the last.
constexpr long BUSY_NS = 500'000, WAITING_NS = 2'000'000;
constexpr long HARDLY_NS = 50'000;

// The kernel's struct sigevent, and its struct itimerspec: no library of the program's is needed for timers.
struct Event {
  void* value;
  int signal;
  int notify;
  int thread;
  int padding[11];
};
struct Times {
  timespec interval;
  timespec first;
};

int timer;
long ran_ns;
bool waits;

void set(long interval_ns) {
  Times times{{0, interval_ns}, {0, interval_ns}};
  syscall(SYS_timer_settime, timer, 0, &times, nullptr);
}

void give_way(int) {
  int kept = errno;
  syscall(SYS_sched_yield);
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  long now_ns = now.tv_sec * 1'000'000'000L + now.tv_nsec;
  bool hardly_ran = now_ns - ran_ns < HARDLY_NS;
  ran_ns = now_ns;
  if (hardly_ran != waits) set((waits = hardly_ran) ? WAITING_NS : BUSY_NS);
  errno = kept;
}

__attribute__((constructor)) void begin() {
  int number = SIGRTMIN + 8;
  struct sigaction action {};
  if (sigaction(number, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = give_way;
  action.sa_flags = SA_RESTART;
  Event event{nullptr, number, NOTIFY_THREAD, static_cast<int>(syscall(SYS_gettid)), {}};
  if (sigaction(number, &action, nullptr) != 0) return;
  if (syscall(SYS_timer_create, CLOCK_MONOTONIC, &event, &timer) == 0) set(BUSY_NS);
}

}  // namespace
