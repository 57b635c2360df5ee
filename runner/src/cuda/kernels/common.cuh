// What every source begins with. No includes: the run-time compiler has no headers of its own.
typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define ALL_LANES 0xffffffffu

// A kernel may begin while the one before it still runs, see `launch` of the driver. Before this call it must neither read
// what earlier kernels write nor write anything. The next one may begin at once: it waits for the end of this one itself,
// which is also the end of all before.
static __device__ __forceinline__ void await_previous() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// As `await_previous`, but the next kernel begins only behind it: where blocks are as short as these, more kernels that wait cost
// more than they save, and where the next kernel has few blocks they get multiprocessors of their own only once the kernels before
// have left them.
static __device__ __forceinline__ void await_previous_first() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

static __device__ __forceinline__ float half_to_float(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

static __device__ __forceinline__ u16 float_to_half(float value) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}

// The first value in the low half.
static __device__ __forceinline__ u32 floats_to_halves(float first, float second) {
    u32 halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(second), "f"(first));
    return halves;
}

static __device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
    u32 product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

static __device__ __forceinline__ u32 subtract_halves(u32 a, u32 b) {
    u32 difference;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

static __device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
    u32 sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// As `__byte_perm`, but for selectors whose nibbles are below 8 anyway: that one makes sure.
static __device__ __forceinline__ u32 permute(u32 low, u32 high, u32 selectors) {
    u32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
    return bytes;
}

// c + sum of the products of four signed bytes.
static __device__ __forceinline__ int dot4(u32 a, u32 b, int c) {
    int sum;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// The same, of unsigned bytes with signed ones.
static __device__ __forceinline__ int dot4_unsigned(u32 a, u32 b, int c) {
    int sum;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}

// Weights are read once: they must not push anything out of the first-level cache.
static __device__ __forceinline__ uint4 load_once(const uint4* place) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(place));
    return v;
}

static __device__ __forceinline__ u32 load_once(const u32* place) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(place));
    return v;
}

static __device__ __forceinline__ u16 load_once(const u16* place) {
    u16 v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(place));
    return v;
}

static __device__ __forceinline__ u8 load_once(const u8* place) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(v) : "l"(place));
    return (u8)v;
}

// Size of a value as an integer that is ordered as sizes are: infinity and then NaN are largest.
static __device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(value) & 0x7fffffffu; }

// In a fixed order, the same on every lane.
static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance; distance >>= 1) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}

// `warp_sum` of each of some values, a power of two of them, with its bits but fewer exchanges: lanes that hold two values give one
// away and keep the other. sums[0] is then that of the value whose number is returned.
template <int N> static __device__ __forceinline__ int sums_of_warp(float (&sums)[N]) {
    int lane = threadIdx.x & 31, number = 0;
#pragma unroll
    for (int distance = 16, count = N; distance; distance >>= 1) {
        if (count > 1) {
            count /= 2;
            bool upper = lane & distance;
            if (upper) number += count;
#pragma unroll
            for (int i = 0; i < count; i++) {
                float given = upper ? sums[i] : sums[i + count], kept = upper ? sums[i + count] : sums[i];
                sums[i] = kept + __shfl_xor_sync(ALL_LANES, given, distance);
            }
        } else {
            sums[0] += __shfl_xor_sync(ALL_LANES, sums[0], distance);
        }
    }
    return number;
}

static __device__ __forceinline__ float inverse_rms(float sum_of_squares, int n, float epsilon) {
    return 1.0f / sqrtf(sum_of_squares / (float)n + epsilon);
}

// silu(min(gate, limit)) * clamp(up, -limit, limit). The division is off by up to two units in the last place: one that
// is rounded exactly would need a function call and, for that, registers.
static __device__ __forceinline__ float swiglu(float gate, float up, float limit) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
    return __fdividef(gate, 1.0f + expf(-gate)) * up;
}

static __device__ __forceinline__ u32 shared_address(const void* place) {
    return (u32)__cvta_generic_to_shared(place);
}

static __device__ __forceinline__ void copy_async(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}

static __device__ __forceinline__ void copy_word_async(u32 shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global));
}

// As `copy_async`, but zeros if not `wanted`.
static __device__ __forceinline__ void copy_async_or_zero(u32 shared, const void* global, bool wanted) {
    int bytes = wanted ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}

static __device__ __forceinline__ void copy_word_or_zero(u32 shared, const void* global, bool wanted) {
    int bytes = wanted ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes));
}

static __device__ __forceinline__ void copies_commit() {
    asm volatile("cp.async.commit_group;");
}

template <int PENDING> static __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING));
}

// sums (16 x 8, f32) += a (16 x 16, f16, by rows) * b (16 x 8, f16, by columns).
static __device__ __forceinline__ void multiply_tile(float* sums, const u32* a, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
