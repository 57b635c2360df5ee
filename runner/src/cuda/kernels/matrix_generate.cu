// Random weights, the same as those of matrix/generate.rs.

struct Patch {
    u32 offset;
    u32 bytes;
    u32 base;
    u32 mask;
};

struct Recipe {
    u64 key;
    u32 block_bytes;
    u32 n_patches;
    Patch patches[4];
    // 0: blocks; else bytes of one float value.
    u32 float_bytes;
    u32 bfloat;
    float factor;
    u32 unused;
};

static __device__ __forceinline__ u64 random_word(u64 key, u64 index) {
    u64 z = key + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

static __device__ u8 generated_byte(const Recipe& recipe, u64 row, u32 row_bytes, u32 at) {
    u64 words = (row_bytes + 7) / 8;
    if (recipe.float_bytes) {
        u64 value = at / recipe.float_bytes, word = random_word(recipe.key, row * (row_bytes / recipe.float_bytes) + value);
        float number = (float)(int)((u32)(word >> 40) - (1 << 23)) * recipe.factor;
        u32 bits = recipe.float_bytes == 4 ? __float_as_uint(number)
            : recipe.bfloat                ? __float_as_uint(number) >> 16
                                           : float_to_half(number);
        return (u8)(bits >> (8 * (at % recipe.float_bytes)));
    }
    u64 word = random_word(recipe.key, row * words + at / 8);
    u32 byte = (u32)(word >> (8 * (at % 8))) & 255, within = at % recipe.block_bytes;
    for (u32 i = 0; i < recipe.n_patches; i++) {
        const Patch& patch = recipe.patches[i];
        if (within >= patch.offset && within < patch.offset + patch.bytes) {
            u64 block = row * (row_bytes / recipe.block_bytes) + at / recipe.block_bytes;
            u32 value = patch.base + ((u32)random_word(recipe.key ^ (patch.offset + 1), block) & patch.mask);
            byte = value >> (8 * (within - patch.offset)) & 255;
        }
    }
    return (u8)byte;
}

extern "C" __global__ void __launch_bounds__(256) generate(const __grid_constant__ Recipe recipe, u8* rows, u64 first_row,
                                                           u64 n_rows, u32 row_bytes) {
    u64 n = n_rows * row_bytes;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        rows[i] = generated_byte(recipe, first_row + i / row_bytes, row_bytes, i % row_bytes);
    }
}

// Reads everything once: what the memory gives at most.
extern "C" __global__ void __launch_bounds__(512) read_all(const uint4* from, u64 n, u32* out) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
    u32 bits = 0;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 a = load_once(from + i), b = load_once(from + i + step);
        uint4 c = load_once(from + i + 2 * step), d = load_once(from + i + 3 * step);
        bits ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    if (bits == 0x12345678u) out[0] = bits;
}

// Keeps the device busy for a while, so that what is to be measured can be queued.
extern "C" __global__ void wait(u64 nanoseconds) {
    u64 now, start;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}
