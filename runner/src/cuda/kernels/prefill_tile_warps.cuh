// A tile by `mma`: a warp multiplies 16 rows by 8 inputs at a time; all warps of a block take a step together.
#if !WARP_GROUPS

// Nothing is kept from one tile to the next.
struct Pipeline {};

static __device__ __forceinline__ Pipeline pipeline_of_block() { return {}; }

static __device__ __forceinline__ u8* stages_in(uint4* memory) { return (u8*)memory; }

// sums[m][n] of the warp's 16 rows m and 8 inputs n.
template <class F, int M, int N, bool PAIRED>
static __device__ __forceinline__ void tile(float (&sums)[M][N][4], const Rows<PAIRED>& rows, u32 columns, const Inputs& x,
                                            u8* memory, const u8* table_memory, Pipeline&) {
    // Opaque, so that nothing made of them is computed before a loop over tiles and kept in registers all the while.
    u32 thread = threadIdx.x;
    asm volatile("" : "+r"(thread), "+r"(columns));
    const u32 lane = thread % WARP, warp = thread / WARP, g = lane / 4, t = lane % 4;
    const u32 steps = columns / F::KC, input_tiles = (x.count + 7) / 8;
    constexpr int ROWS = THREADS / WARP * 16 * M, TOKENS = 8 * N;
    typedef Stages<F, ROWS, TOKENS> At;
    const Copies<F, ROWS, TOKENS, PAIRED> copies(rows, x, thread, columns);
    const u32 odd = odd_rows<F, M>(rows, warp, g, columns);
    const typename F::Table table(table_memory);
    clear(sums);
    u32 a[M][2][4];
    constexpr int AHEAD = At::NUMBER - 1;
#pragma unroll
    for (int stage = 0; stage < AHEAD; stage++) {
        if (stage < steps) copies.begin(stage, shared_address(memory) + stage * At::BYTES);
        copies_commit();
    }
    // Where the step to be computed lies, and where the step that is fetched meanwhile is put.
    u32 own = 0, fetched = AHEAD * At::BYTES;
#pragma unroll 1
    for (u32 step = 0; step < steps; step++) {
        copies_wait<AHEAD - 1>();
        __syncthreads();
        if (step + AHEAD < steps) copies.begin(step + AHEAD, shared_address(memory) + fetched);
        copies_commit();
        const u8* codes = memory + own;
        fetched = own;
        own = own == (At::NUMBER - 1) * At::BYTES ? 0 : own + At::BYTES;
        const u32* scales = (const u32*)(codes + At::SCALES) + warp * 16 * M + g;
        const u8* inputs = codes + At::CODES + g * At::INPUT_PITCH + t * 16;
        codes += (warp * 16 * M + g) * F::PITCH;
        // Unrolled, the parts would need more registers than there are.
#pragma unroll 1
        for (int turn = 0; turn < F::KC / 32; turn++) {
            const int part = F::part(turn);
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    u32 scale = F::SCALES ? scales[m * 16 + r * 8] : 0;
                    bool is_odd = odd >> (2 * m + r) & 1;
                    typename F::Raw raw = F::load(codes + (m * 16 + r * 8) * F::PITCH, scale, is_odd, step, t);
                    F::refill(raw, part % 2 * 2);
                    widen<F>(raw, part, r, table, a[m]);
                }
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
    }
    copies_wait<0>();
    __syncthreads();
}
#endif
