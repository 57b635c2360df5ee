/* A library before a CUDA driver that passes every call on, until one is to fail. Named libcuda.so and put first in
 * LD_LIBRARY_PATH, it is found before the driver, libcuda.so.1, which it is linked with: functions that it lacks are found
 * there. What fails comes from the variable FAULTS, as "name=number,name=number":
 *
 *   launches=N     the Nth launch of a kernel,      } and every call after it, as of a lost device,
 *   graphs=N       the Nth launch of a graph,       } give `code` (719, CUDA_ERROR_LAUNCH_FAILED, if left out).
 *   waits=N        the Nth time a stream is waited for, }
 *   allocations=N  the Nth allocation on the device and all after it find no memory
 *   bytes=N        allocations find no memory where more than N bytes would be taken at a time
 *
 * The variable FAULTS_COUNTS names a file that gets the number of each at the end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "setting.h"

typedef unsigned long long address;

static long setting(const char *name, long otherwise) { return setting_of("FAULTS", name, otherwise); }

/* A function of the driver behind this library. */
static void *behind(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *function = driver ? dlsym(driver, name) : NULL;
    if (!function) {
        fprintf(stderr, "faults: the driver behind lacks %s\n", name);
        abort();
    }
    dlclose(driver);
    return function;
}

static long launches, graphs, waits, allocations, bytes_now, bytes_most;
static int lost;

static int after(long *counter, const char *name) {
    if (lost) return lost;
    if (__atomic_add_fetch(counter, 1, __ATOMIC_RELAXED) == setting(name, -1)) lost = (int)setting("code", 719);
    return lost;
}

__attribute__((destructor)) static void tell(void) {
    const char *path = getenv("FAULTS_COUNTS");
    FILE *file = path && launches ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "launches=%ld\ngraphs=%ld\nwaits=%ld\nallocations=%ld\nbytes=%ld\n", launches, graphs, waits, allocations,
            bytes_most);
    fclose(file);
}

/* Sizes of what is taken now, by address. */
enum { MOST = 1 << 16 };
static struct {
    address pointer;
    size_t bytes;
} sizes[MOST];

static void note(address pointer, size_t bytes) {
    for (size_t i = 0; i < MOST; i++) {
        if (sizes[i].pointer == 0) {
            sizes[i].pointer = pointer;
            sizes[i].bytes = bytes;
            bytes_now += (long)bytes;
            if (bytes_now > bytes_most) bytes_most = bytes_now;
            return;
        }
    }
}

static void forget(address pointer) {
    for (size_t i = 0; i < MOST; i++) {
        if (sizes[i].pointer == pointer) {
            sizes[i].pointer = 0;
            bytes_now -= (long)sizes[i].bytes;
            return;
        }
    }
}

static int mutex;
static void lock(void) {
    while (__atomic_exchange_n(&mutex, 1, __ATOMIC_ACQUIRE)) {
    }
}
static void unlock(void) { __atomic_store_n(&mutex, 0, __ATOMIC_RELEASE); }

int cuMemAllocAsync(address *pointer, size_t bytes, void *stream) {
    int (*next)(address *, size_t, void *) = behind("cuMemAllocAsync");
    if (lost) return lost;
    lock();
    long n = ++allocations, first = setting("allocations", -1), most = setting("bytes", -1);
    int code = 2;
    if (!(first > 0 && n >= first) && !(most >= 0 && bytes_now + (long)bytes > most)) {
        code = next(pointer, bytes, stream);
        if (code == 0) note(*pointer, bytes);
    }
    unlock();
    return code;
}

int cuMemFreeAsync(address pointer, void *stream) {
    int (*next)(address, void *) = behind("cuMemFreeAsync");
    if (lost) return lost;
    lock();
    forget(pointer);
    unlock();
    return next(pointer, stream);
}

/* A call that may be the one that fails, and one that fails only after another has. */
#define COUNTED(name, counter, declared, given)                                                                             \
    int name declared {                                                                                                    \
        int(*next) declared = behind(#name);                                                                               \
        int code = after(&counter, #counter);                                                                              \
        return code ? code : next given;                                                                                   \
    }
#define PASSED(name, declared, given)                                                                                       \
    int name declared {                                                                                                    \
        int(*next) declared = behind(#name);                                                                               \
        return lost ? lost : next given;                                                                                   \
    }

COUNTED(cuLaunchKernelEx, launches, (const void *a, void *b, void **c, void **d), (a, b, c, d))
COUNTED(cuGraphLaunch, graphs, (void *a, void *b), (a, b))
COUNTED(cuStreamSynchronize, waits, (void *a), (a))
PASSED(cuCtxSetCurrent, (void *a), (a))
PASSED(cuCtxSynchronize, (void), ())
PASSED(cuEventCreate, (void **a, unsigned b), (a, b))
PASSED(cuEventDestroy_v2, (void *a), (a))
PASSED(cuEventRecord, (void *a, void *b), (a, b))
PASSED(cuEventSynchronize, (void *a), (a))
PASSED(cuFuncGetAttribute, (int *a, int b, void *c), (a, b, c))
PASSED(cuFuncSetAttribute, (void *a, int b, int c), (a, b, c))
PASSED(cuGraphDestroy, (void *a), (a))
PASSED(cuGraphExecDestroy, (void *a), (a))
PASSED(cuGraphInstantiateWithFlags, (void **a, void *b, unsigned long long c), (a, b, c))
PASSED(cuMemFreeHost, (void *a), (a))
PASSED(cuMemGetInfo_v2, (size_t *a, size_t *b), (a, b))
PASSED(cuMemHostAlloc, (void **a, size_t b, unsigned c), (a, b, c))
PASSED(cuMemPoolTrimTo, (void *a, size_t b), (a, b))
PASSED(cuMemcpyDtoDAsync_v2, (address a, address b, size_t c, void *d), (a, b, c, d))
PASSED(cuMemcpyDtoHAsync_v2, (void *a, address b, size_t c, void *d), (a, b, c, d))
PASSED(cuMemcpyHtoDAsync_v2, (address a, const void *b, size_t c, void *d), (a, b, c, d))
PASSED(cuMemsetD8Async, (address a, unsigned char b, size_t c, void *d), (a, b, c, d))
PASSED(cuModuleGetFunction, (void **a, void *b, const char *c), (a, b, c))
PASSED(cuModuleUnload, (void *a), (a))
PASSED(cuStreamBeginCapture_v2, (void *a, int b), (a, b))
PASSED(cuStreamDestroy_v2, (void *a), (a))
PASSED(cuStreamEndCapture, (void *a, void **b), (a, b))
PASSED(cuStreamWaitEvent, (void *a, void *b, unsigned c), (a, b, c))
