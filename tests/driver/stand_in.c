/* A CUDA driver that computes nothing, for tests on machines without one: memory is the host's, kernels do nothing and
 * succeed. What it says about itself comes from the variable STAND_IN, as "name=number,name=number":
 *
 *   driver   cuDriverGetVersion            init     what cuInit gives
 *   devices  number of devices             retain   what making a context gives
 *   major    compute capability            module   what loading kernels gives
 *   total    bytes of the device           used     bytes that other programs take of them
 *   shared   bytes of shared memory that a block may have
 *   integrated  whether the host's memory is the device's
 *
 * Memory beyond the total is refused. With -DOLD_LIBRARY all functions are absent that tell more than the version. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "setting.h"

typedef unsigned long long address;

static long setting(const char *name, long otherwise) { return setting_of("STAND_IN", name, otherwise); }

int cuDriverGetVersion(int *version) {
    *version = (int)setting("driver", 13000);
    return 0;
}

#ifndef OLD_LIBRARY

static const char *name_of(int code) {
    switch (code) {
    case 2: return "CUDA_ERROR_OUT_OF_MEMORY";
    case 46: return "CUDA_ERROR_DEVICE_UNAVAILABLE";
    case 209: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case 214: return "CUDA_ERROR_ECC_UNCORRECTABLE";
    case 222: return "CUDA_ERROR_UNSUPPORTED_PTX_VERSION";
    case 700: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case 719: return "CUDA_ERROR_LAUNCH_FAILED";
    case 803: return "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH";
    case 999: return "CUDA_ERROR_UNKNOWN";
    default: return NULL;
    }
}

int cuGetErrorName(int code, const char **name) {
    *name = name_of(code);
    return *name ? 0 : 1;
}

int cuGetErrorString(int code, const char **text) {
    *text = name_of(code) ? "as the stand-in was told" : NULL;
    return *text ? 0 : 1;
}

int cuInit(unsigned flags) {
    (void)flags;
    return (int)setting("init", 0);
}

int cuDeviceGetCount(int *n) {
    *n = (int)setting("devices", 1);
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetName(char *name, int length, int device) {
    (void)device;
    snprintf(name, (size_t)length, "Stand-in");
    return 0;
}

enum { MULTIPROCESSORS = 8 };

int cuDeviceGetAttribute(int *value, int which, int device) {
    (void)device;
    switch (which) {
    case 16: *value = MULTIPROCESSORS; break;
    case 18: *value = (int)setting("integrated", 0); break;
    case 38: *value = 1 << 20; break;    /* second-level cache */
    case 75: *value = (int)setting("major", 9); break;
    case 76: *value = 0; break;
    case 97: *value = (int)setting("shared", 227 << 10); break;
    default: *value = 0;
    }
    return 0;
}

static size_t total(void) { return (size_t)setting("total", 8L << 30); }

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    (void)device;
    *bytes = total();
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    *context = (void *)1;
    return (int)setting("retain", 0);
}

int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, 0; }
int cuCtxSetCurrent(void *context) { return (void)context, 0; }

int cuDeviceGetDefaultMemPool(void **pool, int device) {
    (void)device;
    *pool = (void *)1;
    return 0;
}

int cuMemPoolSetAttribute(void *pool, int which, void *value) { return (void)pool, (void)which, (void)value, 0; }
int cuMemPoolTrimTo(void *pool, size_t bytes) { return (void)pool, (void)bytes, 0; }

/* Memory. Before each allocation lies its size. */
enum { HEAD = 256 };
static size_t taken;

static size_t room(void) {
    size_t used = (size_t)setting("used", 0) + __atomic_load_n(&taken, __ATOMIC_RELAXED);
    return used < total() ? total() - used : 0;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *all) {
    *free_bytes = room();
    *all = total();
    return 0;
}

int cuMemAllocAsync(address *pointer, size_t bytes, void *stream) {
    (void)stream;
    if (bytes > room()) return 2;
    char *memory = aligned_alloc(HEAD, HEAD + (bytes + HEAD - 1) / HEAD * HEAD);
    if (!memory) return 2;
    *(size_t *)memory = bytes;
    __atomic_fetch_add(&taken, bytes, __ATOMIC_RELAXED);
    /* Not all the same: logits of which all are equal are refused. What is larger than they are is left as it is. */
    float *values = (float *)(memory + HEAD);
    for (size_t i = 0; i < bytes / sizeof(float) && i < 1 << 22; i++) values[i] = (float)(i * 7919 % 1009) / 1009;
    *pointer = (address)(memory + HEAD);
    return 0;
}

int cuMemFreeAsync(address pointer, void *stream) {
    (void)stream;
    char *memory = (char *)pointer - HEAD;
    __atomic_fetch_sub(&taken, *(size_t *)memory, __ATOMIC_RELAXED);
    free(memory);
    return 0;
}

int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    *pointer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *pointer ? 0 : 2;
}

int cuMemFreeHost(void *pointer) { return free(pointer), 0; }

int cuMemsetD8Async(address to, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    memset((void *)to, value, bytes);
    return 0;
}

int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)to, from, bytes);
    return 0;
}

int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    (void)stream;
    memcpy(to, (void *)from, bytes);
    return 0;
}

int cuMemcpyDtoDAsync_v2(address to, address from, size_t bytes, void *stream) {
    (void)stream;
    memcpy((void *)to, (void *)from, bytes);
    return 0;
}

/* Handles that nobody looks into. */
#define MAKES(name, arguments)                                                                                              \
    int name arguments {                                                                                                   \
        *made = (void *)1;                                                                                                 \
        return 0;                                                                                                          \
    }
#define DOES(name, arguments)                                                                                               \
    int name arguments { return 0; }

#pragma GCC diagnostic ignored "-Wunused-parameter"
MAKES(cuStreamCreate, (void **made, unsigned flags))
DOES(cuStreamDestroy_v2, (void *stream))
DOES(cuCtxSynchronize, (void))
DOES(cuStreamSynchronize, (void *stream))
DOES(cuStreamWaitEvent, (void *stream, void *event, unsigned flags))
DOES(cuStreamBeginCapture_v2, (void *stream, int mode))
MAKES(cuStreamEndCapture, (void *stream, void **made))
MAKES(cuEventCreate, (void **made, unsigned flags))
DOES(cuEventDestroy_v2, (void *event))
DOES(cuEventRecord, (void *event, void *stream))
DOES(cuEventSynchronize, (void *event))
MAKES(cuGraphInstantiateWithFlags, (void **made, void *graph, unsigned long long flags))
DOES(cuGraphDestroy, (void *graph))
DOES(cuGraphExecDestroy, (void *graph))
DOES(cuGraphLaunch, (void *graph, void *stream))
DOES(cuModuleUnload, (void *module))
MAKES(cuModuleGetFunction, (void **made, void *module, const char *name))
DOES(cuFuncSetAttribute, (void *function, int which, int value))
DOES(cuLaunchKernelEx, (const void *config, void *function, void **parameters, void **extra))
DOES(cuDeviceGetDevResource, (int device, void *resource, int kind))
MAKES(cuDevResourceGenerateDesc, (void **made, void *resources, unsigned n))
MAKES(cuGreenCtxCreate, (void **made, void *description, int device, unsigned flags))
MAKES(cuGreenCtxStreamCreate, (void **made, void *context, unsigned flags, int priority))

int cuDevSmResourceSplitByCount(void *part, unsigned *n, const void *all, void *rest, unsigned flags, unsigned least) {
    if (least > MULTIPROCESSORS) return 914; /* CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION */
    ((unsigned *)part)[24] = least; /* sm.smCount of a CUdevResource */
    return 0;
}

int cuFuncGetAttribute(int *value, int which, void *function) {
    *value = 0;
    return 0;
}

int cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
    *milliseconds = 1;
    return 0;
}

int cuModuleLoadData(void **made, const void *image) {
    *made = (void *)1;
    return (int)setting("module", 0);
}

#endif
