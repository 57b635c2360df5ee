//! Weights on the device, and products with them.
//!
//! A [`Matrix`] is `[rows, columns]` in the file's block type. Types and shapes that fast kernels know are stored in
//! another order of the same bytes, see [`layout`]; all others as in the file.
//!
//! Nothing here allocates or waits once a matrix is loaded, and no grid depends on data, so that every operation can be
//! part of a graph. What operations need besides their operands comes from a [`Workspace`].

mod decode;
mod experts;
pub mod generate;
pub mod layout;
mod prefill;

pub(super) use decode::Before;
pub use experts::{ExpertMatrices, Routed};

use gguf_tools::block::BlockType;

use super::driver::{Arguments, DeviceBuffer, Launch, View, ViewMut};
use super::error::CudaError;
use super::module::Gpu;
use layout::Planes;

/// Bytes that are staged at once when a matrix is loaded.
const LOAD_BYTES: usize = 64 << 20;

/// Most rows or items of a grid's second dimension.
const GRID_LIMIT: usize = 65_535;

/// Which numerics a product uses. They are chosen by what is computed, never by the number of tokens: a token's result
/// must not depend on how many others are computed with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Any number of tokens, slowly: inputs stay `f32`, weights are widened, sums are `f32`. The reference on the device.
    Exact,
    /// Few tokens, close to the memory's speed. Inputs stay `f32` for plain matrices and are rounded to 8 bits,
    /// 32 values sharing a scale, for routed experts.
    Decode,
    /// Many tokens, by tensor cores. Inputs and weights are rounded to `f16`, sums are `f32`.
    Prefill,
}

/// Memory that operations use while they run. Operations on one stream may share it; a graph needs it as long as it
/// lives.
pub struct Workspace {
    bytes: DeviceBuffer<u8>,
}

impl Workspace {
    /// As many bytes as the operations to come ask for at most: [`Matrix::workspace_bytes`],
    /// [`ExpertMatrices::workspace_bytes`].
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { bytes: gpu.device.alloc(bytes, "the workspace of matrix products")? })
    }

    /// Its first bytes, cut into parts of these lengths, each aligned.
    pub(super) fn parts<const N: usize>(
        &mut self,
        lengths: [usize; N],
    ) -> Result<[ViewMut<'_, u8>; N], CudaError> {
        let needed = workspace_bytes(&lengths);
        if needed > self.bytes.len() {
            return Err(CudaError::Shape {
                what: "workspace of a matrix product".to_owned(),
                found: format!("{} bytes", self.bytes.len()),
                expected: format!("at least {needed}"),
            });
        }
        let mut rest = Some(self.bytes.view_mut());
        Ok(lengths.map(|length| {
            let (part, later) =
                rest.take().expect("put back below").split_at(length.next_multiple_of(ALIGNMENT));
            rest = Some(later);
            part
        }))
    }
}

/// Alignment of everything in a workspace.
const ALIGNMENT: usize = 256;

/// Bytes of parts with these lengths.
fn workspace_bytes(lengths: &[usize]) -> usize {
    lengths.iter().map(|length| length.next_multiple_of(ALIGNMENT)).sum()
}

/// `[rows, columns]` weights on the device.
#[derive(Debug)]
pub struct Matrix {
    block_type: BlockType,
    rows: usize,
    columns: usize,
    row_bytes: usize,
    /// How the bytes are divided; `None`: as in the file.
    planes: Option<Planes>,
    bytes: DeviceBuffer<u8>,
}

impl Matrix {
    /// A matrix whose rows are still to be put there.
    ///
    /// # Errors
    /// If the columns are no whole number of blocks, nothing can be computed with the type, or memory runs out.
    pub fn empty(gpu: &Gpu, block_type: BlockType, rows: usize, columns: usize) -> Result<Self, CudaError> {
        let wrong = |found: String, expected: String| CudaError::Shape {
            what: format!("matrix of {rows} rows of {columns} values in {block_type}"),
            found,
            expected,
        };
        if block_type.format().is_none() {
            let expected = "a type that can be computed with".to_owned();
            return Err(wrong(block_type.to_string(), expected));
        }
        let row_bytes = block_type.row_bytes(columns as u64).map(|bytes| bytes as usize);
        let row_bytes = row_bytes.ok_or_else(|| {
            wrong(format!("{columns} columns"), format!("a multiple of {}", block_type.values_per_block()))
        })?;
        let n_bytes =
            row_bytes.checked_mul(rows).filter(|_| u32::try_from(rows).is_ok() && columns <= 1 << 24);
        let n_bytes = n_bytes.ok_or_else(|| {
            wrong("more than can be addressed".to_owned(), "at most 2^32 rows of 2^24 values".to_owned())
        })?;
        // Kernels read whole words.
        let bytes = gpu.device.alloc(n_bytes.next_multiple_of(16), "weights")?;
        let planes = Planes::of(block_type, columns);
        Ok(Self { block_type, rows, columns, row_bytes, planes, bytes })
    }

    /// A matrix of the file's bytes, `rows` times the bytes of a row.
    ///
    /// # Errors
    /// As [`Matrix::empty`], or if the number of bytes is another.
    pub fn load(
        gpu: &Gpu,
        block_type: BlockType,
        rows: usize,
        columns: usize,
        bytes: &[u8],
    ) -> Result<Self, CudaError> {
        let mut matrix = Self::empty(gpu, block_type, rows, columns)?;
        matrix.load_rows(gpu, 0, bytes)?;
        Ok(matrix)
    }

    /// Puts rows of the file's bytes, from the host, at row `first`.
    ///
    /// # Errors
    /// If they are no whole rows of this matrix, or memory runs out.
    pub fn load_rows(&mut self, gpu: &Gpu, first: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let piece = (LOAD_BYTES / self.row_bytes.max(1)).max(1) * self.row_bytes;
        for (i, piece_bytes) in bytes.chunks(piece.max(1)).enumerate() {
            let staged = gpu.device.upload(piece_bytes, "staging of weights")?;
            self.put_rows(gpu, first + i * piece / self.row_bytes, staged.view())?;
        }
        Ok(())
    }

    /// Puts rows of the file's bytes, already on the device, at row `first`.
    ///
    /// # Errors
    /// If they are no whole rows of this matrix.
    pub fn put_rows(&mut self, gpu: &Gpu, first: usize, bytes: View<'_, u8>) -> Result<(), CudaError> {
        let n = self.whole_rows(first, bytes.len())?;
        if let Some(planes) = &self.planes {
            return self.repack(gpu, planes, first, n, bytes.address(), false);
        }
        let range = first * self.row_bytes..(first + n) * self.row_bytes;
        gpu.device.copy(bytes, &mut self.bytes.slice_mut(range))
    }

    /// Rows from `first` on as they are in the file, as many as `bytes` holds.
    ///
    /// # Errors
    /// If they are no whole rows of this matrix.
    pub fn read_rows(&self, gpu: &Gpu, first: usize, bytes: &mut ViewMut<'_, u8>) -> Result<(), CudaError> {
        let n = self.whole_rows(first, bytes.len())?;
        if let Some(planes) = &self.planes {
            return self.repack(gpu, planes, first, n, bytes.address(), true);
        }
        let range = first * self.row_bytes..(first + n) * self.row_bytes;
        gpu.device.copy(self.bytes.slice(range), bytes)
    }

    fn whole_rows(&self, first: usize, n_bytes: usize) -> Result<usize, CudaError> {
        let n = n_bytes / self.row_bytes.max(1);
        if n_bytes == n * self.row_bytes && first + n <= self.rows {
            return Ok(n);
        }
        Err(self.wrong(
            "weights",
            format!("{n_bytes} bytes from row {first} on"),
            format!("rows of {} bytes, {} in all", self.row_bytes, self.rows),
        ))
    }

    fn repack(
        &self,
        gpu: &Gpu,
        planes: &Planes,
        first: usize,
        n: usize,
        blocks: u64,
        back: bool,
    ) -> Result<(), CudaError> {
        let arguments = Arguments::new()
            .structure(planes)
            .long(blocks)
            .read(&self.bytes)
            .long(self.rows as u64)
            .long(first as u64)
            .long(n as u64)
            .int(self.row_blocks())
            .int(usize::from(back));
        let blocks = (n * self.row_bytes).div_ceil(1024).min(1 << 20);
        gpu.launch("matrix_repack", "repack", Launch::new(blocks, 256), arguments)
    }

    fn row_blocks(&self) -> usize {
        self.columns / self.block_type.values_per_block()
    }

    /// Type of the weights.
    pub fn block_type(&self) -> BlockType {
        self.block_type
    }

    /// Bytes of a row in the file.
    pub(in super::super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Values a product gives.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values an input has.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The bytes, which are in the file's order where the type has no planes.
    pub(in super::super) fn values_as_stored(&self) -> View<'_, u8> {
        self.bytes.view()
    }

    /// Bytes on the device.
    pub fn n_bytes(&self) -> usize {
        self.bytes.n_bytes()
    }

    fn wrong(&self, operand: &str, found: String, expected: String) -> CudaError {
        let Self { block_type, rows, columns, .. } = self;
        CudaError::Shape {
            what: format!("{operand} of a {block_type} matrix [{rows}, {columns}]"),
            found,
            expected,
        }
    }

    fn check(&self, operand: &str, found: usize, expected: usize) -> Result<(), CudaError> {
        if found == expected {
            return Ok(());
        }
        Err(self.wrong(operand, format!("{found} values"), format!("{expected}")))
    }

    /// Bytes of workspace that [`Matrix::products`] (one group), [`Matrix::products_many`] (the most of its matrices) and
    /// [`Matrix::grouped_products`] need for so many tokens.
    pub fn workspace_bytes(&self, tokens: usize, groups: usize, pass: Pass) -> usize {
        match pass {
            Pass::Prefill if prefill::fits(self) => prefill::input_bytes(tokens * groups * self.columns),
            _ => 0,
        }
    }

    /// `output[token, row] = self[row, .] . input[token, .]`; input `[tokens, columns]`, output `[tokens, rows]`.
    ///
    /// # Errors
    /// If lengths do not belong together, the workspace is too small, or the driver refuses.
    pub fn products(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        input: View<'_, f32>,
        tokens: usize,
        pass: Pass,
        output: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        self.grouped_products(gpu, workspace, input, tokens, 1, pass, output)
    }

    /// Products of several matrices with the same input, in one launch where the kernels allow.
    ///
    /// # Errors
    /// As [`Matrix::products`].
    pub fn products_many(
        gpu: &Gpu,
        workspace: &mut Workspace,
        input: View<'_, f32>,
        tokens: usize,
        pass: Pass,
        matrices: &mut [(&Self, ViewMut<'_, f32>)],
    ) -> Result<(), CudaError> {
        for (matrix, output) in &mut *matrices {
            matrix.check("input", input.len(), tokens * matrix.columns)?;
            matrix.check("output", output.len(), tokens * matrix.rows)?;
        }
        let all: Vec<&Self> = matrices.iter().map(|(matrix, _)| *matrix).collect();
        if pass == Pass::Decode && tokens > 0 && decode::fit_together(&all) {
            let parts: Vec<_> = matrices.iter().map(|(matrix, output)| (*matrix, output.address())).collect();
            return decode::products(gpu, input, tokens, 1, &parts);
        }
        let rounded = |matrix: &Self| pass == Pass::Prefill && tokens > 0 && prefill::fits(matrix);
        let parts = matrices.iter().filter(|(matrix, _)| rounded(matrix));
        let parts: Vec<_> = parts.map(|(matrix, output)| (*matrix, output.address())).collect();
        if !parts.is_empty() {
            prefill::products(gpu, workspace, input, tokens, 1, &parts)?;
        }
        for (matrix, output) in matrices.iter_mut().filter(|(matrix, _)| !rounded(matrix)) {
            matrix.products(gpu, workspace, input, tokens, pass, output)?;
        }
        Ok(())
    }

    /// Products of several matrices with one token's input behind something else, in one launch, with the bits of the two
    /// apart; `false` if there is no kernel for them, and nothing was done.
    pub(super) fn products_behind(
        gpu: &Gpu,
        input: View<'_, f32>,
        before: Before<'_>,
        matrices: &[(&Self, ViewMut<'_, f32>)],
    ) -> Result<bool, CudaError> {
        let all: Vec<&Self> = matrices.iter().map(|(matrix, _)| *matrix).collect();
        if !before.fits(&all) {
            return Ok(false);
        }
        for (matrix, output) in matrices {
            matrix.check("input", input.len(), matrix.columns)?;
            matrix.check("second input", before.n_values(), matrix.columns)?;
            matrix.check("output", output.len(), matrix.rows)?;
        }
        let parts: Vec<_> = matrices.iter().map(|(matrix, output)| (*matrix, output.address())).collect();
        decode::products_behind(gpu, input, before, &parts)?;
        Ok(true)
    }

    /// The rows of the matrix and the columns of the input are cut into `groups`, and each group is a product of its own:
    /// input `[tokens, groups * columns]`, output `[tokens, rows]`.
    ///
    /// # Errors
    /// As [`Matrix::products`], or if the rows cannot be cut so.
    #[expect(clippy::too_many_arguments, reason = "operands of one operation")]
    pub fn grouped_products(
        &self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        input: View<'_, f32>,
        tokens: usize,
        groups: usize,
        pass: Pass,
        output: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        if groups == 0 || !self.rows.is_multiple_of(groups) {
            return Err(self.wrong("groups", groups.to_string(), "a divisor of the rows".to_owned()));
        }
        self.check("input", input.len(), tokens * groups * self.columns)?;
        self.check("output", output.len(), tokens * self.rows)?;
        if tokens == 0 {
            return Ok(());
        }
        match pass {
            Pass::Decode if decode::fits(self) => decode::one(gpu, self, input, tokens, groups, output),
            Pass::Prefill if prefill::fits(self) => {
                prefill::products(gpu, workspace, input, tokens, groups, &[(self, output.address())])
            }
            _ => self.generic_products(gpu, input, tokens, groups, output),
        }
    }

    fn generic_products(
        &self,
        gpu: &Gpu,
        input: View<'_, f32>,
        tokens: usize,
        groups: usize,
        output: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let arguments = Arguments::new()
            .structure(&self.generic_weights())
            .null()
            .read(input)
            .long((groups * self.columns) as u64)
            .int(1)
            .int(self.columns)
            .int(self.rows)
            .int(self.rows / groups)
            .write(output);
        let launch = Launch::new(tokens, 256).by(self.grid_rows()?);
        gpu.launch("matrix_generic", &self.generic_name("products"), launch, arguments)
    }

    /// Name of a generic kernel for this type and order.
    fn generic_name(&self, operation: &str) -> String {
        let order = if self.planes.is_some() { "_planes" } else { "" };
        format!("{operation}_{}{order}", self.block_type.name())
    }

    /// Start and width of a row in each plane, as the generic kernels declare it.
    fn generic_weights(&self) -> [u64; 6] {
        let base = self.bytes.view().address();
        let Some(planes) = self.planes else {
            return [base, base, base, self.row_bytes as u64, 0, 0];
        };
        let start = |plane| base + planes.start(plane, self.rows, self.row_blocks()) as u64;
        let width =
            |plane| planes.start(plane + 1, 1, self.row_blocks()) - planes.start(plane, 1, self.row_blocks());
        let width = |plane| width(plane) as u64;
        [start(0), start(1), start(2), width(0), width(1), width(2)]
    }

    /// Address and rows, as the kernels for many tokens declare them.
    fn address_and_rows(&self) -> [u64; 2] {
        [self.bytes.view().address(), self.rows as u64]
    }

    /// Where each plane begins, as the experts' kernels for few tokens declare it.
    fn plane_starts(&self) -> [u64; 3] {
        let [first, second, third, ..] = self.generic_weights();
        [first, second, third]
    }

    fn grid_rows(&self) -> Result<usize, CudaError> {
        let blocks = self.rows.div_ceil(8);
        if blocks <= GRID_LIMIT {
            return Ok(blocks);
        }
        Err(self.wrong("rows", self.rows.to_string(), format!("at most {} for this type", 8 * GRID_LIMIT)))
    }

    /// Rows `ids` of the matrix as `f32`, each `copies` times: `output[id, copy, .]`. Every id must be below the rows.
    ///
    /// # Errors
    /// If lengths do not belong together or the driver refuses.
    pub fn take_rows(
        &self,
        gpu: &Gpu,
        ids: View<'_, u32>,
        copies: usize,
        output: &mut ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        self.check("rows taken", output.len(), ids.len() * copies * self.columns)?;
        let arguments = Arguments::new()
            .structure(&self.generic_weights())
            .read(ids)
            .int(self.columns)
            .int(copies)
            .write(output);
        gpu.launch("matrix_generic", &self.generic_name("widen"), Launch::new(ids.len(), 128), arguments)
    }
}
