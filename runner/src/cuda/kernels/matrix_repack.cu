// From the file's blocks to planes and back: the same bytes in another order, see matrix/layout.rs.

struct Map {
    u32 block_bytes;
    u32 n_planes;
    // Bytes that a block has in each plane.
    u32 plane_bytes[3];
    u32 unused;
    // Where each byte of a block goes.
    u8 plane[144];
    u8 offset[144];
};

// blocks: rows first_row .. first_row + n_rows of a matrix of `rows` rows, in the file's order; planes: the whole matrix.
extern "C" __global__ void __launch_bounds__(256) repack(const __grid_constant__ Map map, u8* blocks, u8* planes,
                                                         u64 rows, u64 first_row, u64 n_rows, u32 row_blocks,
                                                         u32 back) {
    u64 n = n_rows * row_blocks * map.block_bytes;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        u64 block = i / map.block_bytes;
        u32 byte = i % map.block_bytes;
        u64 row = first_row + block / row_blocks, within = block % row_blocks;
        u32 plane = map.plane[byte];
        u64 start = 0;
        for (u32 before = 0; before < plane; before++) start += rows * row_blocks * map.plane_bytes[before];
        u8* place = planes + start + (row * row_blocks + within) * map.plane_bytes[plane] + map.offset[byte];
        if (back) {
            blocks[i] = *place;
        } else {
            *place = blocks[i];
        }
    }
}
