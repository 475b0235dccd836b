// A library to preload: sees the file system calls of a process under one folder, those of C++
// libraries too. It writes each to a log, and lets one of them fail or end in a signal.
//
// Nothing happens until `calls_watch` and `calls_strike` are called; a forked child inherits nothing
// of them.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char folder[PATH_MAX];
static size_t folder_len;  // 0: nothing is watched
static int log_fd = -1;

static struct {
  char calls[256];    // names, each between commas
  char pattern[256];  // of the path in the folder, as fnmatch has it
  long at;            // the call that matches for the at-th time; 0: none
  long count;         // how many calls from there on fail
  int error;          // an errno, or 0 for a signal
  int signal;         // sent `delay_us` after the call began
  long delay_us;
  int half;           // a write writes half before that
} strike;
static long matches;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((visibility("default"))) void calls_watch(const char *path, int log) {
  snprintf(folder, sizeof folder, "%s", path);
  log_fd = log;
  folder_len = strlen(folder);
}

__attribute__((visibility("default"))) void calls_strike(
    const char *calls, const char *pattern, long at, long count, int error, int signal,
    long delay_us, int half) {
  snprintf(strike.calls, sizeof strike.calls, ",%s,", calls);
  snprintf(strike.pattern, sizeof strike.pattern, "%s", pattern);
  strike.count = count, strike.error = error, strike.signal = signal;
  strike.delay_us = delay_us, strike.half = half;
  matches = 0;
  strike.at = at;
}

// The path in the folder; NULL if it lies elsewhere. `path` may be NULL for `fd` itself.
static const char *inside(int fd, const char *path, char *buffer) {
  size_t n = 0;
  if (path == NULL || path[0] != '/') {
    char link[64];
    if (path != NULL && fd == AT_FDCWD)
      snprintf(link, sizeof link, "/proc/self/cwd");
    else
      snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t got = readlink(link, buffer, PATH_MAX - 1);
    if (got <= 0) return NULL;
    n = (size_t)got;
    if (path != NULL && n < PATH_MAX - 1) buffer[n++] = '/';
  }
  snprintf(buffer + n, PATH_MAX - n, "%s", path == NULL ? "" : path);
  if (strncmp(buffer, folder, folder_len) != 0) return NULL;
  if (buffer[folder_len] == 0) return ".";
  return buffer[folder_len] == '/' ? buffer + folder_len + 1 : NULL;
}

static void send(int number, long delay_us) {
  if (delay_us == 0) {
    syscall(SYS_kill, getpid(), number);
    return;
  }
  struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = number};
  struct itimerspec when = {.it_value = {delay_us / 1000000, delay_us % 1000000 * 1000}};
  timer_t timer;
  if (timer_create(CLOCK_MONOTONIC, &event, &timer) == 0) timer_settime(timer, 0, &when, NULL);
}

// What to do with a call: 0: make it; an errno: fail with it; -1: write half, then the signal.
static int judge(const char *name, int fd, const char *path) {
  if (folder_len == 0) return 0;
  int before = errno, verdict = 0;
  char buffer[PATH_MAX + 2], called[64];
  const char *in = inside(fd, path, buffer);
  errno = before;
  if (in == NULL) return 0;
  snprintf(called, sizeof called, ",%s,", name);
  pthread_mutex_lock(&lock);
  if (log_fd >= 0) {
    char line[PATH_MAX + 128];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int n = snprintf(line, sizeof line, "%lld.%06ld\t%s\t%s\n", (long long)now.tv_sec,
                     now.tv_nsec / 1000, name, in);
    if (syscall(SYS_write, log_fd, line, n) < 0) log_fd = -1;
  }
  if (strike.at > 0 && strstr(strike.calls, called) && fnmatch(strike.pattern, in, 0) == 0) {
    long n = ++matches;
    if (n >= strike.at && n < strike.at + strike.count) {
      if (strike.error)
        verdict = strike.error;
      else if (strike.half && strcmp(name, "write") == 0)
        verdict = -1;
      else
        send(strike.signal, strike.delay_us);
    }
  }
  pthread_mutex_unlock(&lock);
  errno = before;
  return verdict;
}

#define REAL(name) \
  static __typeof__(&name) real; \
  if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL(name, fd, path) \
  do { \
    int verdict = judge(name, fd, path); \
    if (verdict > 0) { \
      errno = verdict; \
      return -1; \
    } \
  } while (0)

static const char *opening(int flags) {
  return flags & (O_WRONLY | O_RDWR | O_CREAT) ? "open" : "read";
}

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    FAIL(opening(flags), AT_FDCWD, path); \
    return real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int fd, const char *path, int flags, ...) { \
    REAL(name); \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    FAIL(opening(flags), fd, path); \
    return real(fd, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(name); \
    int verdict = judge(strpbrk(mode, "wa+") ? "open" : "read", AT_FDCWD, path); \
    if (verdict > 0) { \
      errno = verdict; \
      return NULL; \
    } \
    return real(path, mode); \
  }
FOPEN(fopen)
FOPEN(fopen64)

// A write; the one that is to die halfway writes `half` and sends the signal.
#define WRITE(call, half) \
  do { \
    int verdict = judge("write", fd, NULL); \
    if (verdict > 0) { \
      errno = verdict; \
      return -1; \
    } \
    if (verdict < 0) { \
      if ((half) < 0) return -1; \
      send(strike.signal, 0); \
    } \
    return call; \
  } while (0)

ssize_t write(int fd, const void *data, size_t n) {
  REAL(write);
  WRITE(real(fd, data, n), real(fd, data, n / 2));
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
  REAL(pwrite);
  WRITE(real(fd, data, n, at), real(fd, data, n / 2, at));
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
  REAL(pwrite64);
  WRITE(real(fd, data, n, at), real(fd, data, n / 2, at));
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
  REAL(writev);
  WRITE(real(fd, parts, n), real(fd, parts, 1));
}
ssize_t pwritev(int fd, const struct iovec *parts, int n, off_t at) {
  REAL(pwritev);
  WRITE(real(fd, parts, n, at), real(fd, parts, 1, at));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int n, off64_t at) {
  REAL(pwritev64);
  WRITE(real(fd, parts, n, at), real(fd, parts, 1, at));
}

int fsync(int fd) {
  REAL(fsync);
  FAIL("fsync", fd, NULL);
  return real(fd);
}
int fdatasync(int fd) {
  REAL(fdatasync);
  FAIL("fsync", fd, NULL);
  return real(fd);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  FAIL("rename", AT_FDCWD, to);
  return real(from, to);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
  REAL(renameat);
  FAIL("rename", to_fd, to);
  return real(from_fd, from, to_fd, to);
}
int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
  REAL(renameat2);
  FAIL("rename", to_fd, to);
  return real(from_fd, from, to_fd, to, flags);
}
int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  FAIL("mkdir", AT_FDCWD, path);
  return real(path, mode);
}
int mkdirat(int fd, const char *path, mode_t mode) {
  REAL(mkdirat);
  FAIL("mkdir", fd, path);
  return real(fd, path, mode);
}
int unlink(const char *path) {
  REAL(unlink);
  FAIL("unlink", AT_FDCWD, path);
  return real(path);
}
int unlinkat(int fd, const char *path, int flags) {
  REAL(unlinkat);
  FAIL("unlink", fd, path);
  return real(fd, path, flags);
}
int rmdir(const char *path) {
  REAL(rmdir);
  FAIL("unlink", AT_FDCWD, path);
  return real(path);
}
int remove(const char *path) {
  REAL(remove);
  FAIL("unlink", AT_FDCWD, path);
  return real(path);
}
