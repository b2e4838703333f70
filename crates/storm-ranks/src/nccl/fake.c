/* A library with NCCL's names that writes down how it was called, for the tests of the loader and of the calls. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned char bytes[128]; } Id;

static char calls[4096];
static int fail_next;

#define NOTE(...) snprintf(calls + strlen(calls), sizeof calls - strlen(calls), __VA_ARGS__)
#define RESULT (fail_next ? (fail_next = 0, 5) : 0)

const char *fake_calls(void) { return calls; }
void fake_clear(void) { calls[0] = 0; }
void fake_fail_next(void) { fail_next = 1; }

int ncclGetVersion(int *version) { *version = FAKE_VERSION; return 0; }
int ncclGetUniqueId(Id *id) {
    for (int i = 0; i < 128; i++) id->bytes[i] = (unsigned char)(i * 3 + 1);
    return RESULT;
}
const char *ncclGetErrorString(int code) { return code == 5 ? "invalid usage" : code == 6 ? "remote error" : "?"; }
const char *ncclGetLastError(void *comm) { return comm ? "with a communicator" : ""; }
int ncclCommInitRank(void **comm, int ranks, Id id, int rank) {
    int sum = 0;
    for (int i = 0; i < 128; i++) sum += id.bytes[i];
    NOTE("init ranks %d rank %d id %d\n", ranks, rank, sum);
    *comm = (void *)(size_t)(0x1000 + rank);
    return RESULT;
}
#define NOTED(name) int name(void *comm) { NOTE(#name " %zx\n", (size_t)comm); return RESULT; }
#ifndef FAKE_WITHOUT_FINALIZE
NOTED(ncclCommFinalize)
#endif
NOTED(ncclCommDestroy)
NOTED(ncclCommAbort)
int ncclCommGetAsyncError(void *comm, int *state) { (void)comm; *state = fail_next; fail_next = 0; if (*state) *state = 6; return 0; }
int ncclGroupStart(void) { NOTE("start\n"); return 0; }
int ncclGroupEnd(void) { NOTE("end\n"); return 0; }
int ncclSend(const void *from, size_t count, int type, int rank, void *comm, void *stream) {
    NOTE("send %zx %zu type %d to %d comm %zx stream %zx\n", (size_t)from, count, type, rank, (size_t)comm, (size_t)stream);
    return RESULT;
}
int ncclRecv(void *to, size_t count, int type, int rank, void *comm, void *stream) {
    NOTE("receive %zx %zu type %d from %d comm %zx stream %zx\n", (size_t)to, count, type, rank, (size_t)comm, (size_t)stream);
    return RESULT;
}
