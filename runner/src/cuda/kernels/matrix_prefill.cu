// Products with many inputs, by tensor cores: weights are widened to f16 in registers, straight into the left operand;
// inputs are f16; sums are f32.
//
// On the H100 and H200 a group of four warps multiplies 64 rows by all inputs of a tile at once, which the tensor cores read from
// shared memory by themselves, while its next weights are widened (`wgmma`); elsewhere a warp has 16 rows (`mma`).
//
// A block has 256 or 512 rows (of an expert half of them of gate and the same of up) and up to 64 or 128 inputs. Codes and
// inputs come through shared memory, two to four steps of KC columns deep, so that they fit a block's 99 KiB of the smaller
// chips. The columns of a step are permuted so that the eight weights that a lane holds of one row in one go are neighbours in
// the format's bytes; inputs are stored in that order beforehand. A sum's order is that of the columns, whatever else is
// computed with it.

// Inputs of a tile: f16 rows of `stride` values; input n is row rows[n] (shared memory) for n < count.
struct Inputs {
    const u16* values;
    u64 stride;
    // Volatile, so that addresses made of them are not kept in registers.
    const volatile u32* rows;
    u32 count;
};

// Where in shared memory the stages of a tile are. Where memory is larger, there is one more.
template <class F, int ROWS, int TOKENS> struct Stages {
    static constexpr int NUMBER = F::STAGES + WARP_GROUPS;
    static constexpr int CODES = ROWS * F::PITCH;
    // Eight lanes that read together meet every bank once; what the tensor cores read has no gaps.
    static constexpr int INPUT_PITCH = F::KC == 32 || WARP_GROUPS ? F::KC * 2 : F::KC * 2 + 64;
    // Where scales begin.
    static constexpr int SCALES = CODES + TOKENS * INPUT_PITCH;
    static constexpr int BYTES = SCALES + (F::SCALES ? ROWS * 4 : 0);
    static constexpr int ALL_BYTES = NUMBER * BYTES;
};

// Where a piece of 16 bytes of an input lies among those of a stage.
template <class F, int ROWS, int TOKENS> static __device__ __forceinline__ u32 input_place(u32 n, u32 piece) {
#if WARP_GROUPS
    // Rows of 128 bytes (or 64), in which pieces are swapped by the row's number, as descriptors below say.
    if (F::KC == 32) return n * 64 + (piece ^ (n / 2 % 4)) * 16;
    return piece / 8 * (TOKENS * 128) + n * 128 + (piece % 8 ^ n % 8) * 16;
#else
    return n * Stages<F, ROWS, TOKENS>::INPUT_PITCH + piece * 16;
#endif
}

#if WARP_GROUPS
// Tells the tensor cores where in shared memory 16 columns of the inputs are: eight rows repeat every SBO bytes.
template <class F> static __device__ __forceinline__ u64 described(u32 address) {
    const u64 rows = F::KC == 32 ? 64 : 128, layout = F::KC == 32 ? 2 : 1;
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (rows * 8 >> 4) << 32 | layout << 62;
}

// sums (64 x 64 or 64 x 128) += a (64 x 16, in registers) * b (16 columns of inputs, in shared memory).
static __device__ __forceinline__ void multiply_group(float (&s)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%2"
        "7,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]),
          "+f"(s[1][3]), "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]), "+f"(s[3][0]), "+f"(s[3][1]),
          "+f"(s[3][2]), "+f"(s[3][3]), "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]), "+f"(s[5][0]),
          "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]), "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]),
          "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void multiply_group(float (&s)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%2"
        "7,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%5"
        "2,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
        "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
        : "+f"(s[0][0]), "+f"(s[0][1]), "+f"(s[0][2]), "+f"(s[0][3]), "+f"(s[1][0]), "+f"(s[1][1]), "+f"(s[1][2]),
          "+f"(s[1][3]), "+f"(s[2][0]), "+f"(s[2][1]), "+f"(s[2][2]), "+f"(s[2][3]), "+f"(s[3][0]), "+f"(s[3][1]),
          "+f"(s[3][2]), "+f"(s[3][3]), "+f"(s[4][0]), "+f"(s[4][1]), "+f"(s[4][2]), "+f"(s[4][3]), "+f"(s[5][0]),
          "+f"(s[5][1]), "+f"(s[5][2]), "+f"(s[5][3]), "+f"(s[6][0]), "+f"(s[6][1]), "+f"(s[6][2]), "+f"(s[6][3]),
          "+f"(s[7][0]), "+f"(s[7][1]), "+f"(s[7][2]), "+f"(s[7][3]), "+f"(s[8][0]), "+f"(s[8][1]), "+f"(s[8][2]),
          "+f"(s[8][3]), "+f"(s[9][0]), "+f"(s[9][1]), "+f"(s[9][2]), "+f"(s[9][3]), "+f"(s[10][0]), "+f"(s[10][1]),
          "+f"(s[10][2]), "+f"(s[10][3]), "+f"(s[11][0]), "+f"(s[11][1]), "+f"(s[11][2]), "+f"(s[11][3]), "+f"(s[12][0]),
          "+f"(s[12][1]), "+f"(s[12][2]), "+f"(s[12][3]), "+f"(s[13][0]), "+f"(s[13][1]), "+f"(s[13][2]), "+f"(s[13][3]),
          "+f"(s[14][0]), "+f"(s[14][1]), "+f"(s[14][2]), "+f"(s[14][3]), "+f"(s[15][0]), "+f"(s[15][1]), "+f"(s[15][2]),
          "+f"(s[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void groups_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Nothing that is made of these values is computed before: operands of products that are not done must not be written.
template <class Raw> static __device__ __forceinline__ void stays_behind(Raw& raw) {
    u32* words = (u32*)&raw;
#pragma unroll
    for (int i = 0; i < sizeof(Raw) / 4; i++) asm volatile("" : "+r"(words[i]));
}

static __device__ __forceinline__ void groups_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until so many of the latest are left.
template <int PENDING> static __device__ __forceinline__ void groups_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
#endif

// Which rows a tile has, in shared memory: a row of a matrix, and in the top bit which of two matrices.
// Local rows 32 w .. 32 w + 15 are m = 0 of warp w, the next 16 are m = 1; or 16 w .. 16 w + 15 where there is one m.
typedef u32 TileRows[THREADS];
#define SECOND 0x80000000u

// Where the stages begin: descriptors want 1,024 bytes.
static __device__ __forceinline__ u8* stages_in(uint4* memory) {
#if WARP_GROUPS
    return (u8*)memory + (0u - shared_address(memory) & 1023);
#else
    return (u8*)memory;
#endif
}

// sums[m][n] of the warp's 16 rows m and 8 inputs n.
template <class F, int M, int N>
static __device__ __forceinline__ void tile(float (&sums)[M][N][4], const Weights& first, const Weights& second,
                                            const TileRows& rows, u32 columns, const Inputs& x, u8* memory,
                                            const uint4* table) {
    // Opaque, so that nothing made of them is computed before a loop over tiles and kept in registers all the while.
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(columns));
    const u32 lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    const u32 steps = columns / F::KC, input_tiles = (x.count + 7) / 8;
    constexpr int ROWS = THREADS / WARP * 16 * M, TOKENS = 8 * N;
    typedef Stages<F, ROWS, TOKENS> At;
    constexpr int INPUT_PIECES = F::KC / 8, SLOTS = F::PIECES > 4 ? 8 : F::PIECES > 2 ? 4 : 2;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
        }
    }
    auto fetch = [&](u32 step, u8* stage) {
#pragma unroll
        for (int i = 0; i < SLOTS * ROWS / THREADS; i++) {
            u32 index = i * THREADS + thread, local = index / SLOTS, piece = index % SLOTS, row = rows[local];
            if (piece < F::PIECES) {
                copy_async(shared_address(stage + local * F::PITCH + piece * 16),
                           F::piece(row & SECOND ? second : first, row & ~SECOND, columns, step, piece));
            }
        }
        if (F::SCALES && (ROWS == THREADS || thread < ROWS)) {
            u32 row = rows[thread];
            copy_word_async(shared_address(stage + At::SCALES + thread * 4),
                            F::scales(row & SECOND ? second : first, row & ~SECOND, columns, step));
        }
#pragma unroll
        for (int i = 0; i < TOKENS * INPUT_PIECES / THREADS; i++) {
            u32 n = (i * THREADS + thread) / INPUT_PIECES, piece = thread % INPUT_PIECES;
            if (n < input_tiles * 8) {
                bool inside = n < x.count;
                const u16* from = x.values + x.rows[inside ? n : 0] * x.stride + step * F::KC + piece * 8;
                u8* place = stage + At::CODES + input_place<F, ROWS, TOKENS>(n, piece);
                copy_async_or_zero(shared_address(place), from, inside);
            }
        }
    };
    u32 a[2][2][4];
    // Of the rows of this lane: g and g + 8 of each m.
    u32 odd = 0;
#pragma unroll
    for (int r = 0; r < 2 * M; r++) odd |= F::odd(rows[warp * 16 * M + r * 8 + g], columns) ? 1u << r : 0;
    // Steps that are fetched ahead. Tensor cores may still read the stage before, which is left alone.
    constexpr int AHEAD = At::NUMBER - 1 - WARP_GROUPS;
#pragma unroll
    for (int stage = 0; stage < AHEAD; stage++) {
        if (stage < steps) fetch(stage, memory + stage * At::BYTES);
        copies_commit();
    }
    auto behind = [](u32 stage) { return stage == (At::NUMBER - 1) * At::BYTES ? 0 : stage + At::BYTES; };
    // Where the step to be computed lies, and where the step that is fetched meanwhile is put.
    u32 own = 0, fetched = AHEAD * At::BYTES;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        copies_wait<AHEAD - 1>();
#if WARP_GROUPS
        // What was copied is seen by the tensor cores.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        __syncthreads();
        if (step + AHEAD < steps) fetch(step + AHEAD, memory + fetched);
        copies_commit();
        const u8* codes = memory + own;
        fetched = WARP_GROUPS ? behind(fetched) : own;
        own = behind(own);
        const u32* scales = (const u32*)(codes + At::SCALES) + warp * 16 * M + g;
        const u8* inputs = codes + At::CODES;
        codes += (warp * 16 * M + g) * F::PITCH;
        // Rows g and g + 8 of one m.
        auto load = [&](int m, int r) {
            u32 scale = F::SCALES ? scales[m * 16 + r * 8] : 0;
            return F::load(codes + (m * 16 + r * 8) * F::PITCH, scale, odd >> (2 * m + r) & 1, step, t);
        };
        // Eight weights of each: left operands of the first four of each lane, then of the other four.
        auto widen = [&](const typename F::Raw& raw, int part, int r, u32 (&a)[2][4]) {
            u32 w[4];
            F::widen(raw, part, table, w);
            a[0][r] = w[0];
            a[0][2 + r] = w[1];
            a[1][r] = w[2];
            a[1][2 + r] = w[3];
        };
#if WARP_GROUPS
        const u32 address = shared_address(inputs);
        constexpr int PARTS = F::KC / 32;
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (PARTS == 1) groups_wait<0>();
            typename F::Raw upper = load(m, 0), lower = load(m, 1);
            // While weights are multiplied, others are widened, to where the products of those before are done.
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                if (PARTS > 1) groups_wait<1>();
                stays_behind(upper);
                stays_behind(lower);
                widen(upper, part, 0, a[part % 2]);
                widen(lower, part, 1, a[part % 2]);
                const u64 b = described<F>(address + part / 2 * (TOKENS * 128) + part % 2 * 64);
                groups_begin();
                multiply_group(sums[m], a[part % 2][0], b);
                // 32 bytes on.
                multiply_group(sums[m], a[part % 2][1], b + 2);
                groups_commit();
            }
        }
#else
        inputs += g * At::INPUT_PITCH + t * 16;
        // Unrolled, the parts would need more registers than there are.
#pragma unroll 1
        for (int part = 0; part < F::KC / 32; part++) {
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) widen(load(m, r), part, r, a[m]);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                if (n < input_tiles) {
                    uint4 b = *(const uint4*)(inputs + n * 8 * At::INPUT_PITCH + part * 64);
#pragma unroll
                    for (int m = 0; m < M; m++) multiply_tile(sums[m][n], a[m][0], b.x, b.y);
#pragma unroll
                    for (int m = 0; m < M; m++) multiply_tile(sums[m][n], a[m][1], b.z, b.w);
                }
            }
        }
#endif
    }
#if WARP_GROUPS
    groups_wait<0>();
#endif
    copies_wait<0>();
    __syncthreads();
}

// out[token, row] = matrix[row, .] . x[token, group of the row, .].
// Grid: (token tiles, row tiles of a group, groups).
template <class F>
static __device__ __forceinline__ void dense(const Weights& matrix, const u16* x, u64 stride, u32 columns, u32 group_rows,
                                             u32 tokens, float* out) {
    constexpr int M = DENSE_ROWS / (THREADS / WARP * 16), N = DENSE_TOKENS / 8;
    typedef Stages<F, DENSE_ROWS, DENSE_TOKENS> At;
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[DENSE_TOKENS];
    __shared__ TileRows rows;
    const u32 first_token = blockIdx.x * DENSE_TOKENS, first = blockIdx.y * DENSE_ROWS, group = blockIdx.z;
    if (threadIdx.x < DENSE_TOKENS) rows_of_x[threadIdx.x] = first_token + threadIdx.x;
    rows[threadIdx.x] = group * group_rows + min(first + threadIdx.x, group_rows - 1);
    u8* memory = stages_in(shared_memory);
    F::fill((uint4*)(memory + At::ALL_BYTES));
    __syncthreads();
    Inputs inputs = {x + (u64)group * columns, stride, rows_of_x, min(tokens - first_token, (u32)DENSE_TOKENS)};
    float sums[M][N][4];
    tile<F, M, N>(sums, matrix, matrix, rows, columns, inputs, memory, (const uint4*)(memory + At::ALL_BYTES));
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 row = first + (warp * M + m) * 16 + i / 2 * 8 + g, token = n * 8 + t * 2 + i % 2;
                if (row < group_rows && token < inputs.count) {
                    out[(u64)(first_token + token) * matrix.rows + (u64)group * group_rows + row] = sums[m][n][i];
                }
            }
        }
    }
}

// Items sorted by expert: starts[e] .. starts[e + 1] are those of expert e, in the order of `order`.
// Tiles of all experts: before[e] (shared memory) counts the tiles of the experts before e.
static __device__ __forceinline__ u32 count_tiles(const u32* starts, u32 n_experts, u32* before) {
    __shared__ u32 warp_sums[THREADS / WARP];
    __shared__ u32 total;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    for (u32 base = 0; base < n_experts; base += THREADS) {
        u32 e = base + threadIdx.x;
        u32 own = e < n_experts ? (starts[e + 1] - starts[e] + EXPERT_TOKENS - 1) / EXPERT_TOKENS : 0, sum = own;
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2) {
            u32 other = __shfl_up_sync(ALL_LANES, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (lane == WARP - 1) warp_sums[warp] = sum;
        __syncthreads();
        u32 earlier = total;
        for (u32 w = 0; w < warp; w++) earlier += warp_sums[w];
        if (e < n_experts) before[e] = earlier + sum - own;
        __syncthreads();
        if (threadIdx.x == THREADS - 1) total = earlier + sum;
        __syncthreads();
    }
    return total;
}

// The last expert whose tiles begin at or before `tile`.
static __device__ __forceinline__ u32 expert_of(const u32* before, u32 n_experts, u32 tile) {
    u32 low = 0, high = n_experts;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (before[middle] <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Where the values 2 pair and 2 pair + 1 of a piece of eight are among the columns of a step. Those that one lane multiplies
// are neighbours for `mma`; `wgmma` has an order of its own, in each 32 columns.
static __device__ __forceinline__ u32 place_of_pair(u32 piece, u32 pair) {
#if WARP_GROUPS
    return piece / 4 * 32 + pair * 8 + piece % 4 * 2;
#else
    return piece * 8 + pair * 2;
#endif
}

// Place of a column among those of its step in the order that a format wants; `pieces` has a hexadecimal digit for each
// piece of eight columns.
static __device__ __forceinline__ u32 permuted(u32 column, u64 pieces, u32 step_columns) {
    u32 within = column % step_columns;
    return column - within + place_of_pair(pieces >> (within / 8 * 4) & 15, within % 8 / 2) + within % 2;
}

// What the kernels for experts share.
struct Sorted {
    const u32* starts;
    // Item at each place.
    const u32* order;
    u32 n_experts;
    u32 unused;
};

// A tile of the work of `gate_up` and `down`, in shared memory: what is needed again behind the products need not stay in
// registers meanwhile.
struct Tile {
    u32 expert;
    u32 first_row;
    u32 place;
    u32 count;
};

// Tile `index` of those of all experts; tiles of the same weights follow each other.
static __device__ __forceinline__ void find_tile(volatile Tile& tile, const Sorted& sorted, const u32* before, u32 index,
                                                 u32 row_tiles, u32 tile_rows) {
    u32 expert = expert_of(before, sorted.n_experts, index / row_tiles);
    u32 start = sorted.starts[expert], end = sorted.starts[expert + 1];
    u32 expert_tiles = (end - start + EXPERT_TOKENS - 1) / EXPERT_TOKENS, within = index - before[expert] * row_tiles;
    u32 place = start + within % expert_tiles * EXPERT_TOKENS;
    tile.expert = expert;
    tile.first_row = within / expert_tiles * tile_rows;
    tile.place = place;
    tile.count = min(end - place, (u32)EXPERT_TOKENS);
}

// mids[place, .] = weight * swiglu(gate x, up x) as f16, in the order that the down product wants;
// plain[item, .]: without the weight, f32, if wanted. A block takes tiles in turn.
template <class F>
static __device__ __forceinline__ void gate_up(const Weights& gate, const Weights& up, const Sorted& sorted, const u16* x,
                                               u32 n_used, const float* weights, u32 columns, u32 rows, float limit,
                                               u64 pieces, u32 step_columns, u16* mids, float* plain) {
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[EXPERT_TOKENS], items[EXPERT_TOKENS];
    __shared__ TileRows tile_rows;
    __shared__ volatile Tile now;
    u8* memory = stages_in(shared_memory);
    uint4* table = (uint4*)(memory + Stages<F, THREADS, EXPERT_TOKENS>::ALL_BYTES);
    u32* before = (u32*)((u8*)table + F::TABLE_BYTES);
    F::fill(table);
    const u32 row_tiles = (rows + THREADS / 2 - 1) / (THREADS / 2), tiles = count_tiles(sorted.starts, sorted.n_experts, before) * row_tiles;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        if (threadIdx.x == 0) find_tile(now, sorted, before, index, row_tiles, THREADS / 2);
        __syncthreads();
        if (threadIdx.x < now.count) {
            u32 item = sorted.order[now.place + threadIdx.x];
            items[threadIdx.x] = item;
            rows_of_x[threadIdx.x] = item / n_used;
        }
        u32 row = min(now.first_row + threadIdx.x / 32 * 16 + threadIdx.x % 16, rows - 1);
        tile_rows[threadIdx.x] = (now.expert * rows + row) | (threadIdx.x / 16 % 2 ? SECOND : 0);
        __syncthreads();
        Inputs inputs = {x, columns, rows_of_x, now.count};
        float sums[2][8][4];
        tile<F, 2, 8>(sums, gate, up, tile_rows, columns, inputs, memory, table);
        const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            u32 row = now.first_row + warp * 16 + i / 2 * 8 + g, column = permuted(row, pieces, step_columns);
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    u32 token = n * 8 + t * 2 + j;
                    if (row < rows && token < now.count) {
                        float mid = swiglu(sums[0][n][i + j], sums[1][n][i + j], limit);
                        u32 item = items[token];
                        if (plain) plain[(u64)item * rows + row] = mid;
                        mids[(u64)(now.place + token) * rows + column] = float_to_half(mid * weights[item]);
                    }
                }
            }
        }
        __syncthreads();
    }
}

// parts[item, .] = down(expert of the item) . mids[place, .]. A block takes tiles in turn.
template <class F>
static __device__ __forceinline__ void down(const Weights& matrix, const Sorted& sorted, const u16* mids, u32 columns,
                                            u32 rows, float* parts) {
    extern __shared__ uint4 shared_memory[];
    __shared__ u32 rows_of_x[EXPERT_TOKENS], items[EXPERT_TOKENS];
    __shared__ TileRows tile_rows;
    __shared__ volatile Tile now;
    u8* memory = stages_in(shared_memory);
    uint4* table = (uint4*)(memory + Stages<F, THREADS, EXPERT_TOKENS>::ALL_BYTES);
    u32* before = (u32*)((u8*)table + F::TABLE_BYTES);
    F::fill(table);
    const u32 row_tiles = (rows + THREADS - 1) / THREADS;
    const u32 tiles = count_tiles(sorted.starts, sorted.n_experts, before) * row_tiles;
    for (u32 index = blockIdx.x; index < tiles; index += gridDim.x) {
        if (threadIdx.x == 0) find_tile(now, sorted, before, index, row_tiles, THREADS);
        __syncthreads();
        if (threadIdx.x < now.count) {
            items[threadIdx.x] = sorted.order[now.place + threadIdx.x];
            rows_of_x[threadIdx.x] = now.place + threadIdx.x;
        }
        tile_rows[threadIdx.x] = now.expert * rows + min(now.first_row + threadIdx.x, rows - 1);
        __syncthreads();
        Inputs inputs = {mids, columns, rows_of_x, now.count};
        float sums[2][8][4];
        tile<F, 2, 8>(sums, matrix, matrix, tile_rows, columns, inputs, memory, table);
        const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int n = 0; n < 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    u32 row = now.first_row + warp * 32 + m * 16 + i / 2 * 8 + g, token = n * 8 + t * 2 + i % 2;
                    if (row < rows && token < now.count) parts[(u64)items[token] * rows + row] = sums[m][n][i];
                }
            }
        }
        __syncthreads();
    }
}

#define DENSE(NAME, F)                                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) dense_##NAME(                                            \
        const __grid_constant__ Weights matrix, const u16* x, u64 stride, u32 columns, u32 group_rows, u32 tokens,    \
        float* out) {                                                                                                 \
        dense<F>(matrix, x, stride, columns, group_rows, tokens, out);                                                \
    }

#define EXPERTS(NAME, F)                                                                                              \
    DENSE(NAME, F)                                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) gate_up_##NAME(                                          \
        const __grid_constant__ Weights gate, const __grid_constant__ Weights up,                                     \
        const __grid_constant__ Sorted sorted, const u16* x, u32 n_used, const float* weights, u32 columns, u32 rows, \
        float limit, u64 pieces, u32 step_columns, u16* mids, float* plain) {                                         \
        gate_up<F>(gate, up, sorted, x, n_used, weights, columns, rows, limit, pieces, step_columns, mids, plain);    \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) down_##NAME(                                             \
        const __grid_constant__ Weights matrix, const __grid_constant__ Sorted sorted, const u16* mids, u32 columns,  \
        u32 rows, float* parts) {                                                                                     \
        down<F>(matrix, sorted, mids, columns, rows, parts);                                                          \
    }

DENSE(Q8_0, Q8_0)
DENSE(F16, F16)
EXPERTS(IQ2_XXS, Iq2Xxs)
EXPERTS(Q2_K, Q2K)
EXPERTS(Q4_K, Q4K)
EXPERTS(MXFP4, Mxfp4)

// halves[row, .] = values[row, .] as f16, pieces of eight columns in the order that a format wants.
extern "C" __global__ void __launch_bounds__(256) to_halves(const float* values, u64 n, u64 pieces, u32 step_columns,
                                                            u16* halves) {
    u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= n) return;
    float4 a = *(const float4*)(values + i), b = *(const float4*)(values + i + 4);
    u32 within = i % step_columns;
    u32 piece = pieces >> (within / 8 * 4) & 15;
    u16* to = halves + (i - within);
    *(u32*)(to + place_of_pair(piece, 0)) = floats_to_halves(a.x, a.y);
    *(u32*)(to + place_of_pair(piece, 1)) = floats_to_halves(a.z, a.w);
    *(u32*)(to + place_of_pair(piece, 2)) = floats_to_halves(b.x, b.y);
    *(u32*)(to + place_of_pair(piece, 3)) = floats_to_halves(b.z, b.w);
}

// Sorts items by expert, keeping their order within one: starts[n_experts + 1] and order[n]. A block has one expert; it
// counts the items of the experts before its own, so that blocks need not wait for each other.
extern "C" __global__ void __launch_bounds__(256) sort_by_expert(const u32* experts, u32 n, u32 n_experts, u32* starts,
                                                                 u32* order) {
    constexpr u32 warps = 256 / WARP;
    __shared__ u32 before[warps], own[warps];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, expert = blockIdx.x;
    const u32 share = (n + warps - 1) / warps, begin = min(warp * share, n), end = min(begin + share, n);
    u32 less = 0, equal = 0;
    for (u32 i = begin; i < end; i += WARP) {
        u32 id = i + lane < end ? experts[i + lane] : ALL_LANES;
        less += __popc(__ballot_sync(ALL_LANES, id < expert));
        equal += __popc(__ballot_sync(ALL_LANES, id == expert));
    }
    if (lane == 0) {
        before[warp] = less;
        own[warp] = equal;
    }
    __syncthreads();
    u32 start = 0, place = 0, total = 0;
    for (u32 w = 0; w < warps; w++) {
        start += before[w];
        if (w < warp) place += own[w];
        total += own[w];
    }
    if (threadIdx.x == 0) {
        starts[expert] = start;
        if (expert == n_experts - 1) starts[n_experts] = start + total;
    }
    place += start;
    for (u32 i = begin; i < end; i += WARP) {
        bool mine = i + lane < end && experts[i + lane] == expert;
        u32 all = __ballot_sync(ALL_LANES, mine);
        if (mine) order[place + __popc(all & ((1u << lane) - 1))] = i + lane;
        place += __popc(all);
    }
}
