// Counts calls into libc and makes one of them fail. Loaded into `storm` with LD_PRELOAD; see shim.rs.
//
// STORM_SHIM_COUNTS  a file of 8-byte counters, shared by all processes that are started: first how often a
//                    fault was injected, then the calls of each kind, in the order of `enum kind`
// STORM_SHIM_KIND    the number of the kind of call that fails. Without it, calls are only counted
// STORM_SHIM_AT      which call of that kind, from 1
// STORM_SHIM_FAULT   an errno as a number, SHORT to do part of a read or write, KILL to end the process
// STORM_SHIM_PATH    if given, only reads and writes of files with this in their path count
#define _GNU_SOURCE
#include <dlfcn.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, READ, WRITE, SYNC, RENAME, MKDIR, UNLINK, MAP, THREAD, STAT, TRUNCATE, LOCK, SPAWN, POSITIONED, ALLOCATE, KINDS };

enum { PASS, FAIL, PART };

static _Atomic uint64_t *counts;
static int fault_kind = -1;
static uint64_t fault_at;
static int fault_errno;
static int fault_is_short, fault_is_kill;
static const char *chosen_path;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("STORM_SHIM_COUNTS");
    if (!path) return;
    // Bypasses the functions below.
    long file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
    if (file < 0) return;
    size_t bytes = (1 + KINDS) * sizeof(uint64_t);
    void *map = (void *)syscall(SYS_mmap, NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (map == MAP_FAILED) return;
    const char *kind = getenv("STORM_SHIM_KIND"), *at = getenv("STORM_SHIM_AT"), *fault = getenv("STORM_SHIM_FAULT");
    if (kind && at && fault) {
        fault_kind = atoi(kind);
        fault_at = strtoull(at, NULL, 10);
        fault_is_short = !strcmp(fault, "SHORT");
        fault_is_kill = !strcmp(fault, "KILL");
        fault_errno = atoi(fault);
    }
    chosen_path = getenv("STORM_SHIM_PATH");
    counts = map;
}

// Counts a call, and decides whether it fails.
static int next(enum kind kind) {
    if (!counts) return PASS;
    uint64_t number = atomic_fetch_add(&counts[1 + kind], 1) + 1;
    if ((int)kind != fault_kind || number != fault_at) return PASS;
    atomic_fetch_add(&counts[0], 1);
    if (fault_is_kill) kill(getpid(), SIGKILL);
    if (fault_is_short) return PART;
    errno = fault_errno;
    return FAIL;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

// A function that returns -1 when it fails.
#define WRAP(kind, type, name, parameters, arguments) \
    type name parameters { \
        REAL(name); \
        return next(kind) == FAIL ? -1 : real arguments; \
    }

// The last parameter is given only if a file may be created.
#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) {
    REAL(open);
    MODE(flags)
    return next(OPEN) == FAIL ? -1 : real(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    REAL(open64);
    MODE(flags)
    return next(OPEN) == FAIL ? -1 : real(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    REAL(openat);
    MODE(flags)
    return next(OPEN) == FAIL ? -1 : real(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    REAL(openat64);
    MODE(flags)
    return next(OPEN) == FAIL ? -1 : real(folder, path, flags, mode);
}
DIR *opendir(const char *path) {
    REAL(opendir);
    return next(OPEN) == FAIL ? NULL : real(path);
}

// The standard streams are not the files of a command.
#define IS_STREAM(file) ((file) <= 2)

// Whether the file counts, by its path.
static int is_chosen(int file) {
    if (IS_STREAM(file)) return 0;
    if (!chosen_path) return 1;
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strstr(path, chosen_path) != NULL;
}

static size_t part(size_t bytes) { return bytes > 1 ? bytes / 2 : bytes; }

#define WRAP_BYTES(kind, name, parameters, whole, half) \
    ssize_t name parameters { \
        REAL(name); \
        int what = is_chosen(file) ? next(kind) : PASS; \
        return what == FAIL ? -1 : what == PART ? real half : real whole; \
    }

WRAP_BYTES(READ, read, (int file, void *to, size_t n), (file, to, n), (file, to, part(n)))
WRAP_BYTES(READ, pread, (int file, void *to, size_t n, off_t at), (file, to, n, at), (file, to, part(n), at))
WRAP_BYTES(READ, pread64, (int file, void *to, size_t n, off64_t at), (file, to, n, at), (file, to, part(n), at))
WRAP_BYTES(READ, readv, (int file, const struct iovec *to, int n), (file, to, n), (file, to, 1))
WRAP_BYTES(WRITE, write, (int file, const void *of, size_t n), (file, of, n), (file, of, part(n)))
WRAP_BYTES(POSITIONED, pwrite, (int file, const void *of, size_t n, off_t at), (file, of, n, at), (file, of, part(n), at))
WRAP_BYTES(POSITIONED, pwrite64, (int file, const void *of, size_t n, off64_t at), (file, of, n, at), (file, of, part(n), at))
WRAP_BYTES(WRITE, writev, (int file, const struct iovec *of, int n), (file, of, n), (file, of, 1))
ssize_t copy_file_range(int from, off64_t *from_at, int to, off64_t *to_at, size_t n, unsigned flags) {
    REAL(copy_file_range);
    int what = next(WRITE);
    return what == FAIL ? -1 : real(from, from_at, to, to_at, what == PART ? part(n) : n, flags);
}

WRAP(SYNC, int, fsync, (int file), (file))
WRAP(SYNC, int, fdatasync, (int file), (file))
WRAP(RENAME, int, rename, (const char *from, const char *to), (from, to))
WRAP(RENAME, int, renameat, (int a, const char *from, int b, const char *to), (a, from, b, to))
WRAP(RENAME, int, renameat2, (int a, const char *from, int b, const char *to, unsigned flags), (a, from, b, to, flags))
WRAP(MKDIR, int, mkdir, (const char *path, mode_t mode), (path, mode))
WRAP(MKDIR, int, mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
WRAP(UNLINK, int, unlink, (const char *path), (path))
WRAP(UNLINK, int, unlinkat, (int folder, const char *path, int flags), (folder, path, flags))
WRAP(UNLINK, int, rmdir, (const char *path), (path))
WRAP(TRUNCATE, int, ftruncate, (int file, off_t bytes), (file, bytes))
WRAP(TRUNCATE, int, ftruncate64, (int file, off64_t bytes), (file, bytes))
WRAP(ALLOCATE, int, fallocate, (int file, int mode, off_t from, off_t bytes), (file, mode, from, bytes))
WRAP(ALLOCATE, int, fallocate64, (int file, int mode, off64_t from, off64_t bytes), (file, mode, from, bytes))
WRAP(LOCK, int, flock, (int file, int how), (file, how))
WRAP(STAT, int, stat64, (const char *path, struct stat64 *to), (path, to))
WRAP(STAT, int, lstat64, (const char *path, struct stat64 *to), (path, to))
WRAP(STAT, int, fstat64, (int file, struct stat64 *to), (file, to))
int statx(int folder, const char *path, int flags, unsigned mask, struct statx *to) {
    REAL(statx);
    // The standard library calls this with null pointers to see whether the system call exists.
    const void *volatile place = to;
    int is_question = !place;
    return !is_question && next(STAT) == FAIL ? -1 : real(folder, path, flags, mask, to);
}

// Counts maps of files, and large maps of memory. Small ones are signal stacks of threads, without which
// Rust's standard library aborts.
#define MAP_BYTES_MIN (64 << 10)

#define WRAP_MAP(name, offset) \
    void *name(void *at, size_t bytes, int access, int flags, int file, offset from) { \
        REAL(name); \
        int is_counted = file >= 0 || bytes >= MAP_BYTES_MIN; \
        return is_counted && next(MAP) == FAIL ? MAP_FAILED : real(at, bytes, access, flags, file, from); \
    }

WRAP_MAP(mmap, off_t)
WRAP_MAP(mmap64, off64_t)

// These return the error number.
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*what)(void *), void *with) {
    REAL(pthread_create);
    return next(THREAD) == FAIL ? errno : real(thread, how, what, with);
}
int posix_spawnp(pid_t *id, const char *path, const posix_spawn_file_actions_t *files, const posix_spawnattr_t *how,
                 char *const words[], char *const environment[]) {
    REAL(posix_spawnp);
    return next(SPAWN) == FAIL ? errno : real(id, path, files, how, words, environment);
}
WRAP(SPAWN, pid_t, fork, (void), ())
