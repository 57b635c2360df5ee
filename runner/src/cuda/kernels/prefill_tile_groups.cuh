// A tile by `wgmma`: a group of four warps multiplies 64 rows by all inputs of the tile, which the tensor cores read from
// shared memory by themselves, while its next weights are widened. Groups do not wait for each other in every step: those
// ahead may be as far before the last as there are stages. So one widens while another multiplies.
#if WARP_GROUPS

// Tells the tensor cores where in shared memory 16 columns of the inputs are: rows of 128 bytes, of which eight repeat.
static __device__ __forceinline__ u64 described(u32 address) {
    const u64 eight_rows = 8 * 128 >> 4, swizzle_of_128 = 1;
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | eight_rows << 32 | swizzle_of_128 << 62;
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

// Nothing is done with sums across this point: what else would write them must not come between products.
template <int M, int N> static __device__ __forceinline__ void settle(float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) asm volatile("" : "+f"(sums[m][n][i])::"memory");
        }
    }
}

static __device__ __forceinline__ void groups_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until so many of the latest are left.
template <int PENDING> static __device__ __forceinline__ void groups_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Where the stages begin: descriptors want 1,024 bytes.
static __device__ __forceinline__ u8* stages_in(uint4* memory) {
    return (u8*)memory + (0u - shared_address(memory) & 1023);
}

static __device__ __forceinline__ void barrier_begin(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// If `wanted`. There is no branch, for between products the compiler makes each wait for the one before it, then.
static __device__ __forceinline__ void barrier_arrive(u32 barrier, bool wanted) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.u32 wanted, %1, 0;\n"
        "@wanted mbarrier.arrive.shared::cta.b64 _, [%0];\n"
        "}" ::"r"(barrier), "r"((u32)wanted)
        : "memory");
}

// Arrives when all copies that the thread has begun are there.
static __device__ __forceinline__ void barrier_arrive_behind_copies(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase with this parity.
static __device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// Most stages of any format.
#define MOST_STAGES 4

// Turns at the stages, the same in all threads: the stage of a step, and whether it was gone through an odd number of times.
struct Turn {
    u32 stage;
    u32 parity;

    template <int NUMBER> __device__ __forceinline__ void advance() {
        if (++stage == NUMBER) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// The stages between those who fill them, all threads, and those who empty them, all warps.
struct Pipeline {
    // Shared memory: for every stage a barrier that it is full, then for every stage one that it is empty.
    u32 barriers;
    Turn turn;

    __device__ __forceinline__ u32 full(u32 stage) const { return barriers + stage * 8; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return barriers + (MOST_STAGES + stage) * 8; }
};

static __device__ __forceinline__ Pipeline pipeline_of_block() {
    __shared__ u64 barriers[2 * MOST_STAGES];
    Pipeline pipeline = {shared_address(barriers), {0, 0}};
    if (threadIdx.x < MOST_STAGES) {
        barrier_begin(pipeline.full(threadIdx.x), THREADS);
        barrier_begin(pipeline.empty(threadIdx.x), THREADS / WARP);
    }
    __syncthreads();
    return pipeline;
}

// sums[m][n] of the warp's 16 rows m and 8 inputs n.
template <class F, int M, int N, bool PAIRED>
static __device__ __forceinline__ void tile(float (&sums)[M][N][4], const Rows<PAIRED>& rows, u32 columns, const Inputs& x,
                                            u8* memory, const u8* table_memory, Pipeline& pipeline) {
    // Opaque, so that nothing made of them is computed before a loop over tiles and kept in registers all the while.
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(columns));
    const u32 lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4, steps = columns / F::KC;
    constexpr int ROWS = THREADS / WARP * 16 * M, TOKENS = 8 * N, PARTS = F::KC / 32;
    typedef Stages<F, ROWS, TOKENS> At;
    const Copies<F, ROWS, TOKENS, PAIRED> copies(rows, x, thread, columns);
    const u32 odd = odd_rows<F, M>(rows, warp, g, columns);
    const typename F::Table table(table_memory);
    clear(sums);
    Turn fetched = pipeline.turn;
    auto fetch = [&](u32 step) {
        barrier_wait(pipeline.empty(fetched.stage), fetched.parity ^ 1);
        copies.begin(step, shared_address(memory) + fetched.stage * At::BYTES);
        barrier_arrive_behind_copies(pipeline.full(fetched.stage));
        fetched.template advance<At::NUMBER>();
    };
    // Tells those who fill it that a warp has done with a stage.
    auto release = [&](u32 stage, bool wanted) {
        __syncwarp();
        barrier_arrive(pipeline.empty(stage), wanted && lane == 0);
    };
    // The stage of the step before last is free when a step begins, or will be when the last group has begun the step before.
    constexpr u32 AHEAD = At::NUMBER - 2;
    for (u32 step = 0; step < min(AHEAD, steps); step++) fetch(step);
    u32 a[2][2][4], before = 0;
    settle(sums);
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        const u32 stage = pipeline.turn.stage;
        barrier_wait(pipeline.full(stage), pipeline.turn.parity);
        // What was copied is seen by the tensor cores. This waits for all copies that the thread has begun: there should be
        // none that were begun just now.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        if (step + AHEAD < steps) fetch(step + AHEAD);
        const u8* codes = memory + stage * At::BYTES;
        const u32* scales = (const u32*)(codes + At::SCALES) + warp * 16 * M + g;
        const u64 inputs = described(shared_address(codes + At::CODES));
        codes += (warp * 16 * M + g) * F::PITCH;
        // Rows g and g + 8 of one m.
        auto load = [&](int m, int r) {
            u32 scale = F::SCALES ? scales[m * 16 + r * 8] : 0;
            return F::load(codes + (m * 16 + r * 8) * F::PITCH, scale, odd >> (2 * m + r) & 1, step, t);
        };
#pragma unroll
        for (int m = 0; m < M; m++) {
            // What is loaded is multiplied as it is then, in the same registers.
            if (F::AS_STORED) groups_wait<0>();
            typename F::Raw upper = load(m, 0), lower = load(m, 1);
            // While weights are multiplied, others are widened, to where the products of those before are done.
#pragma unroll
            for (int turn = 0; turn < PARTS; turn++) {
                groups_wait<1>();
                // Now all products of the step before are done.
                if (m == 0 && turn == 1) release(before, step > 0);
                stays_behind(upper);
                stays_behind(lower);
                F::refill(upper, turn);
                F::refill(lower, turn);
                const int part = F::part(turn);
                widen<F>(upper, part, 0, table, a[turn % 2]);
                widen<F>(lower, part, 1, table, a[turn % 2]);
                const u64 b = inputs + ((part / 2 * (TOKENS * 128) + part % 2 * 64) >> 4);
                groups_begin();
                multiply_group(sums[m], a[turn % 2][0], b);
                // 32 bytes on.
                multiply_group(sums[m], a[turn % 2][1], b + 2);
                groups_commit();
            }
        }
        before = stage;
        pipeline.turn.template advance<At::NUMBER>();
    }
    groups_wait<0>();
    settle(sums);
    release(before, true);
}
#endif
