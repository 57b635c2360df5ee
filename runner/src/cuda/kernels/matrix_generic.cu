// Products with matrices of every type: correct for all shapes, not fast.
// A warp has one row of the matrix; a lane widens 32 values at a time.

static __device__ const u16 d_iq2_xxs[256] = {IQ2_XXS_CODEBOOK};
static __device__ const u16 d_iq2_xs[512] = {IQ2_XS_CODEBOOK};
static __device__ const u16 d_iq3_xxs[256] = {IQ3_XXS_CODEBOOK};
static __device__ const i8 d_iq4_nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static __device__ const i8 d_e2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static __device__ __forceinline__ u32 read16(const u8* p) { return p[0] | (u32)p[1] << 8; }
static __device__ __forceinline__ u32 read32(const u8* p) { return read16(p) | read16(p + 2) << 16; }
static __device__ __forceinline__ float half_at(const u8* p) { return half_to_float((u16)read16(p)); }

// A matrix: each row has bytes in one plane (the file's order) or in up to three.
struct Weights {
    const u8* start[3];
    u64 width[3];
};

struct Row {
    const u8* codes;
    const u8* scales;
    const u8* super;
};

static __device__ __forceinline__ Row row_of(const Weights& w, u64 row) {
    return {w.start[0] + row * w.width[0], w.start[1] + row * w.width[1], w.start[2] + row * w.width[2]};
}

// Each format: `values(row, group, n, v)` widens values 32 * group to 32 * group + 31 of a row of which n exist.
struct F32 {
    static __device__ void values(const Row& row, int group, int n, float* v) {
        const float* p = (const float*)row.codes + group * 32;
        for (int i = 0; i < 32; i++) v[i] = i < n ? p[i] : 0.0f;
    }
};

struct F16 {
    static __device__ void values(const Row& row, int group, int n, float* v) {
        const u16* p = (const u16*)row.codes + group * 32;
        for (int i = 0; i < 32; i++) v[i] = i < n ? half_to_float(p[i]) : 0.0f;
    }
};

struct BF16 {
    static __device__ void values(const Row& row, int group, int n, float* v) {
        const u16* p = (const u16*)row.codes + group * 32;
        for (int i = 0; i < 32; i++) v[i] = i < n ? __uint_as_float((u32)p[i] << 16) : 0.0f;
    }
};

// Q4_0, Q4_1, Q5_0, Q5_1.
template <int BYTES, bool MINIMUM, bool FIFTH> struct SmallBlocks {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)group * BYTES;
        float d = half_at(b), m = MINIMUM ? half_at(b + 2) : 0.0f;
        const u8* fifth = b + (MINIMUM ? 4 : 2);
        u32 high = FIFTH ? read32(fifth) : 0;
        const u8* codes = fifth + (FIFTH ? 4 : 0);
        for (int i = 0; i < 32; i++) {
            int code = (i < 16 ? codes[i] & 15 : codes[i - 16] >> 4) | (int)((high >> i & 1) << 4);
            v[i] = MINIMUM ? d * (float)code + m : d * (float)(code - (FIFTH ? 16 : 8));
        }
    }
};

struct Q8_0 {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)group * 34;
        float d = half_at(b);
        for (int i = 0; i < 32; i++) v[i] = d * (float)(i8)b[2 + i];
    }
};

struct Q8_0Planes {
    static __device__ void values(const Row& row, int group, int, float* v) {
        float d = half_at(row.scales + 2 * group);
        const i8* codes = (const i8*)row.codes + 32 * group;
        for (int i = 0; i < 32; i++) v[i] = d * (float)codes[i];
    }
};

struct Q2_K {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* codes = row.codes + group / 8 * 64;
        const u8* scales = row.scales + group / 8 * 16;
        const u8* dm = row.super + group / 8 * 4;
        int h = group / 4 % 2, j = group % 4;
        float d = half_at(dm), dmin = half_at(dm + 2);
        for (int part = 0; part < 2; part++) {
            u8 s = scales[8 * h + 4 * part + j];
            float scale = d * (float)(s & 15), minimum = dmin * (float)(s >> 4);
            for (int i = 0; i < 16; i++) {
                int code = codes[32 * h + 16 * part + i] >> (2 * j) & 3;
                v[16 * part + i] = scale * (float)code - minimum;
            }
        }
    }
};

struct Q3_K {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)(group / 8) * 110;
        int h = group / 4 % 2, j = group % 4;
        float d = half_at(b + 108);
        for (int part = 0; part < 2; part++) {
            int k = 8 * h + 2 * j + part;
            int s = (b[96 + k % 8] >> (k / 8 * 4) & 15) | (b[104 + k % 4] >> (k / 4 * 2) & 3) << 4;
            float scale = d * (float)(s - 32);
            for (int i = 0; i < 16; i++) {
                int at = 16 * part + i;
                int code = (b[32 + 32 * h + at] >> (2 * j) & 3) | (b[at] >> (4 * h + j) & 1) << 2;
                v[at] = scale * (float)(code - 4);
            }
        }
    }
};

// Scale and minimum j of Q4_K and Q5_K.
static __device__ void six_bits(const u8* s, int j, int* scale, int* minimum) {
    if (j < 4) {
        *scale = s[j] & 63;
        *minimum = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        *minimum = s[j + 4] >> 4 | s[j] >> 6 << 4;
    }
}

struct Q4_K {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* head = row.scales + group / 8 * 16;
        int j = group % 8, s, m;
        six_bits(head + 4, j, &s, &m);
        float scale = half_at(head) * (float)s, minimum = half_at(head + 2) * (float)m;
        const u8* codes = row.codes + group / 8 * 128 + j / 2 * 32;
        for (int i = 0; i < 32; i++) v[i] = scale * (float)(codes[i] >> (j % 2 * 4) & 15) - minimum;
    }
};

struct Q5_K {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)(group / 8) * 176;
        int j = group % 8, s, m;
        six_bits(b + 4, j, &s, &m);
        float scale = half_at(b) * (float)s, minimum = half_at(b + 2) * (float)m;
        const u8* codes = b + 48 + j / 2 * 32;
        for (int i = 0; i < 32; i++) {
            int code = (codes[i] >> (j % 2 * 4) & 15) | (b[16 + i] >> j & 1) << 4;
            v[i] = scale * (float)code - minimum;
        }
    }
};

struct Q6_K {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)(group / 8) * 210;
        int h = group / 4 % 2, j = group % 4;
        float d = half_at(b + 208);
        for (int part = 0; part < 2; part++) {
            float scale = d * (float)(i8)b[192 + 8 * h + 2 * j + part];
            for (int i = 0; i < 16; i++) {
                int at = 16 * part + i;
                int code = (b[64 * h + j % 2 * 32 + at] >> (j / 2 * 4) & 15)
                    | (b[128 + 32 * h + at] >> (2 * j) & 3) << 4;
                v[at] = scale * (float)(code - 32);
            }
        }
    }
};

static __device__ __forceinline__ bool negative(u32 sign_index, int i) {
    return i < 7 ? sign_index >> i & 1 : __popc(sign_index & 127) & 1;
}

static __device__ __forceinline__ float magnitude2(u32 code) {
    return code == 0 ? 8.0f : code == 1 ? 25.0f : 43.0f;
}

struct IQ2_XXS {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* g = row.codes + 8 * group;
        u32 word = read32(g + 4);
        float scale = half_at(row.scales + group / 8 * 2) * (0.5f + (float)(word >> 28)) * 0.25f;
        for (int i = 0; i < 32; i++) {
            int k = i / 8;
            float m = magnitude2(d_iq2_xxs[g[k]] >> (i % 8 * 2) & 3);
            v[i] = scale * (negative(word >> (7 * k), i % 8) ? -m : m);
        }
    }
};

struct IQ2_XS {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)(group / 8) * 74;
        float d = half_at(b);
        u8 indices = b[66 + group % 8];
        for (int i = 0; i < 32; i++) {
            int k = i / 8;
            u32 word = read16(b + 2 + group % 8 * 8 + 2 * k);
            float scale = d * (0.5f + (float)(k < 2 ? indices & 15 : indices >> 4)) * 0.25f;
            float m = magnitude2(d_iq2_xs[word & 511] >> (i % 8 * 2) & 3);
            v[i] = scale * (negative(word >> 9, i % 8) ? -m : m);
        }
    }
};

struct IQ3_XXS {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)(group / 8) * 98;
        u32 word = read32(b + 66 + group % 8 * 4);
        float scale = half_at(b) * (0.5f + (float)(word >> 28)) * 0.5f;
        for (int i = 0; i < 32; i++) {
            u32 code = d_iq3_xxs[b[2 + group % 8 * 8 + i / 4]] >> (i % 4 * 3) & 7;
            float m = code == 7 ? 62.0f : 4.0f + 8.0f * (float)code;
            v[i] = scale * (negative(word >> (7 * (i / 8)), i % 8) ? -m : m);
        }
    }
};

struct IQ4_NL {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)group * 18;
        float d = half_at(b);
        for (int i = 0; i < 16; i++) {
            v[i] = d * (float)d_iq4_nl[b[2 + i] & 15];
            v[i + 16] = d * (float)d_iq4_nl[b[2 + i] >> 4];
        }
    }
};

struct IQ4_XS {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)(group / 8) * 136;
        int s = group % 8;
        int low = b[4 + s / 2] >> (4 * (s % 2)) & 15, high = read16(b + 2) >> (2 * s) & 3;
        float scale = half_at(b) * (float)((low | high << 4) - 32);
        for (int i = 0; i < 16; i++) {
            u8 byte = b[8 + 16 * s + i];
            v[i] = scale * (float)d_iq4_nl[byte & 15];
            v[i + 16] = scale * (float)d_iq4_nl[byte >> 4];
        }
    }
};

static __device__ void mxfp4(u32 exponent, const u8* codes, float* v) {
    float scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    for (int i = 0; i < 16; i++) {
        v[i] = scale * (float)d_e2m1[codes[i] & 15];
        v[i + 16] = scale * (float)d_e2m1[codes[i] >> 4];
    }
}

struct MXFP4 {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)group * 17;
        mxfp4(b[0], b + 1, v);
    }
};

struct MXFP4Planes {
    static __device__ void values(const Row& row, int group, int, float* v) {
        mxfp4(row.scales[group], row.codes + 16 * group, v);
    }
};

struct NVFP4 {
    static __device__ void values(const Row& row, int group, int, float* v) {
        const u8* b = row.codes + (u64)(group / 2) * 36;
        for (int part = 0; part < 2; part++) {
            int s = group % 2 * 2 + part;
            u32 exponent = b[s] >> 3 & 15, mantissa = b[s] & 7;
            float scale = b[s] == 0x7F ? 0.0f
                : exponent == 0 ? (float)mantissa / 1024.0f
                                : (float)(8 + mantissa) * __uint_as_float((exponent + 116) << 23);
            for (int i = 0; i < 8; i++) {
                u8 byte = b[4 + 8 * s + i];
                v[16 * part + i] = (float)d_e2m1[byte & 15] * scale;
                v[16 * part + 8 + i] = (float)d_e2m1[byte >> 4] * scale;
            }
        }
    }
};

// out[item, row] = matrix(item)[row, .] . input(item).
// matrices: [n, rows, columns]; item i uses matrix chosen[i], or 0 where `chosen` is null;
// its input begins at input + i / share * stride, and at column row / group_rows * columns of that.
// Grid: (items, rows / 8), blocks of 8 warps.
template <class Format>
static __device__ __forceinline__ void products(const Weights& matrices, const u32* chosen, const float* input, u64 stride,
                                                u32 share, u32 columns, u32 rows, u32 group_rows,
                                                float* out) {
    u32 lane = threadIdx.x % WARP, row = blockIdx.y * 8 + threadIdx.x / WARP, item = blockIdx.x;
    if (row >= rows) return;
    u64 matrix = chosen ? chosen[item] : 0;
    Row weights = row_of(matrices, matrix * rows + row);
    const float* x = input + item / share * stride + (u64)(row / group_rows) * columns;
    float sum = 0.0f;
#pragma unroll 1
    for (u32 group = lane; group * 32 < columns; group += WARP) {
        float v[32];
        int n = min(columns - group * 32, 32u);
        Format::values(weights, group, n, v);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i < n) sum = fmaf(v[i], x[group * 32 + i], sum);
        }
    }
    sum = warp_sum(sum);
    if (lane == 0) out[(u64)item * rows + row] = sum;
}

// Rows ids[i] (or i where `ids` is null) of a matrix, each written `copies` times: out[i, copy, column].
template <class Format>
static __device__ __forceinline__ void widen(const Weights& matrix, const u32* ids, u32 columns, u32 copies, float* out) {
    u64 item = blockIdx.x;
    Row row = row_of(matrix, ids ? ids[item] : item);
    for (u32 group = threadIdx.x; group * 32 < columns; group += blockDim.x) {
        float v[32];
        int n = min(columns - group * 32, 32u);
        Format::values(row, group, n, v);
        for (u32 copy = 0; copy < copies; copy++) {
            float* to = out + (item * copies + copy) * columns + group * 32;
            for (int i = 0; i < n; i++) to[i] = v[i];
        }
    }
}

#define FORMAT(NAME, ...)                                                                                              \
    extern "C" __global__ void __launch_bounds__(256) products_##NAME(                                                 \
        const __grid_constant__ Weights matrices, const u32* chosen, const float* input, u64 stride, u32 share,        \
        u32 columns, u32 rows, u32 group_rows, float* out) {                                                           \
        products<__VA_ARGS__>(matrices, chosen, input, stride, share, columns, rows, group_rows, out);                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128) widen_##NAME(const __grid_constant__ Weights matrix,             \
                                                                   const u32* ids, u32 columns, u32 copies,            \
                                                                   float* out) {                                       \
        widen<__VA_ARGS__>(matrix, ids, columns, copies, out);                                                         \
    }

FORMAT(F32, F32)
FORMAT(F16, F16)
FORMAT(BF16, BF16)
FORMAT(Q4_0, SmallBlocks<18, false, false>)
FORMAT(Q4_1, SmallBlocks<20, true, false>)
FORMAT(Q5_0, SmallBlocks<22, false, true>)
FORMAT(Q5_1, SmallBlocks<24, true, true>)
FORMAT(Q8_0, Q8_0)
FORMAT(Q8_0_planes, Q8_0Planes)
FORMAT(Q2_K_planes, Q2_K)
FORMAT(Q3_K, Q3_K)
FORMAT(Q4_K_planes, Q4_K)
FORMAT(Q5_K, Q5_K)
FORMAT(Q6_K, Q6_K)
FORMAT(IQ2_XXS_planes, IQ2_XXS)
FORMAT(IQ2_XS, IQ2_XS)
FORMAT(IQ3_XXS, IQ3_XXS)
FORMAT(IQ4_NL, IQ4_NL)
FORMAT(IQ4_XS, IQ4_XS)
FORMAT(MXFP4, MXFP4)
FORMAT(MXFP4_planes, MXFP4Planes)
FORMAT(NVFP4, NVFP4)

// mids[item, .] = swiglu(gate[item, .], up[item, .]), as it is and times the weight of the item.
extern "C" __global__ void activate(const float* gate, const float* up, const float* weights, float limit, u32 width,
                                    u64 n, float* plain, float* mids) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float mid = swiglu(gate[i], up[i], limit);
    if (plain) plain[i] = mid;
    mids[i] = weights ? mid * weights[i / width] : mid;
}

// out[token, .] = sum of parts[token, slot, .] in the order of the slots.
extern "C" __global__ void sum_slots(const float* parts, u32 slots, u32 width, u64 n, float* out) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u64 token = i / width, column = i % width;
    float sum = 0.0f;
    for (u32 slot = 0; slot < slots; slot++) sum += parts[(token * slots + slot) * width + column];
    out[i] = sum;
}
