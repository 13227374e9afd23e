//! The bytes of a cache in main memory.

use super::table::{PageCopy, Run};
use super::{CacheDesc, CacheError, Codec};
use crate::memory::Zeroed;
use crate::tensor::dense;
use crate::{TensorView, TensorViewMut};

/// K or V of one layer: `[pages, heads, page, dim]`, row-major.
#[derive(Debug)]
pub(super) struct Pool {
    memory: Zeroed,
    codec: Codec,
    shape: [usize; 4],
    row_bytes: usize,
}

impl Pool {
    fn new(codec: Codec, shape: [usize; 4]) -> Result<Self, CacheError> {
        let [pages, heads, page, dim] = shape;
        let row_bytes = codec.row_bytes(dim);
        // The description is validated, so this does not overflow.
        let bytes = pages * heads * page * row_bytes;
        let memory = Zeroed::new(bytes).ok_or(CacheError::Memory { bytes })?;
        Ok(Self { memory, codec, shape, row_bytes })
    }

    /// First byte of a row.
    const fn at(&self, page: usize, head: usize, row: usize) -> usize {
        let [_, heads, rows, _] = self.shape;
        ((page * heads + head) * rows + row) * self.row_bytes
    }

    const fn heads(&self) -> usize {
        self.shape[1]
    }

    /// The rows as a tensor; `None` where they are not plain elements.
    pub(super) fn view(&self) -> Option<TensorView<'_>> {
        // Size and alignment are right: the description is validated, and memory starts on a line.
        TensorView::from_bytes(self.codec.dtype()?, &self.memory, self.shape, dense(self.shape)).ok()
    }

    /// Stores rows `from..` of a tensor `[1, heads, tokens, dim]`.
    pub(super) fn write(&mut self, run: Run, tensor: &TensorView<'_>, from: usize) {
        for head in 0..self.heads() {
            let at = self.at(run.page, head, run.row);
            let rows = &mut self.memory[at..at + run.tokens * self.row_bytes];
            for (row, into) in rows.chunks_exact_mut(self.row_bytes).enumerate() {
                self.codec.encode(tensor.dtype(), tensor.row_bytes([0, head, from + row]), into);
            }
        }
    }

    /// Reads rows into rows `into..` of a tensor `[1, heads, tokens, dim]`.
    pub(super) fn read(&self, run: Run, tensor: &mut TensorViewMut<'_>, into: usize) {
        let dtype = tensor.dtype();
        for head in 0..self.heads() {
            let at = self.at(run.page, head, run.row);
            let rows = &self.memory[at..at + run.tokens * self.row_bytes];
            for (row, bytes) in rows.chunks_exact(self.row_bytes).enumerate() {
                self.codec.decode(bytes, dtype, tensor.row_bytes_mut([0, head, into + row]));
            }
        }
    }

    /// Bytes of `tokens` tokens.
    pub(super) const fn bytes_of(&self, tokens: usize) -> usize {
        self.heads() * tokens * self.row_bytes
    }

    /// Copies rows to rows `at..` of dense bytes `[heads, tokens, row]`.
    pub(super) fn export(&self, run: Run, at: usize, bytes: &mut [u8]) {
        let head_bytes = bytes.len() / self.heads();
        for (head, bytes) in bytes.chunks_exact_mut(head_bytes).enumerate() {
            let (from, len) = (self.at(run.page, head, run.row), run.tokens * self.row_bytes);
            bytes[at * self.row_bytes..][..len].copy_from_slice(&self.memory[from..from + len]);
        }
    }

    /// Copies rows `at..` of dense bytes `[heads, tokens, row]` into rows.
    pub(super) fn import(&mut self, run: Run, at: usize, bytes: &[u8]) {
        let head_bytes = bytes.len() / self.heads();
        for (head, bytes) in bytes.chunks_exact(head_bytes).enumerate() {
            let (to, len) = (self.at(run.page, head, run.row), run.tokens * self.row_bytes);
            self.memory[to..to + len].copy_from_slice(&bytes[at * self.row_bytes..][..len]);
        }
    }

    fn copy(&mut self, copy: &PageCopy) {
        for head in 0..self.heads() {
            let from = self.at(copy.from, head, copy.rows.start);
            let to = self.at(copy.to, head, copy.rows.start);
            self.memory.copy_within(from..from + copy.rows.len() * self.row_bytes, to);
        }
    }

    #[cfg(feature = "testkit")]
    fn poison(&mut self, held: &[bool]) {
        let [_, heads, rows, _] = self.shape;
        for (row, held) in held.iter().enumerate() {
            if !held {
                for head in 0..heads {
                    let at = self.at(row / rows, head, row % rows);
                    self.memory[at..at + self.row_bytes].fill(0xFF);
                }
            }
        }
    }
}

/// K and V of one layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) k: Pool,
    pub(super) v: Pool,
}

impl Layer {
    /// Both pools.
    pub(super) fn pools(&self) -> [&Pool; 2] {
        [&self.k, &self.v]
    }

    /// Both pools.
    pub(super) fn pools_mut(&mut self) -> [&mut Pool; 2] {
        [&mut self.k, &mut self.v]
    }
}

/// K and V of every layer.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) layers: Vec<Layer>,
}

impl Store {
    /// Zeroed pools for a validated description.
    pub(super) fn new(desc: &CacheDesc) -> Result<Self, CacheError> {
        let mut layers = Vec::new();
        super::table::reserve(&mut layers, desc.layers)?;
        let [k, v] = desc.pools();
        for _ in 0..desc.layers {
            layers.push(Layer { k: Pool::new(desc.k, k)?, v: Pool::new(desc.v, v)? });
        }
        Ok(Self { layers })
    }

    /// Copies rows in every pool.
    pub(super) fn copy(&mut self, copies: &[PageCopy]) {
        for layer in &mut self.layers {
            for pool in layer.pools_mut() {
                copies.iter().for_each(|copy| pool.copy(copy));
            }
        }
    }

    /// Fills the rows `[pages, page]` that are not held with NaN.
    #[cfg(feature = "testkit")]
    pub(super) fn poison(&mut self, held: &[bool]) {
        for layer in &mut self.layers {
            layer.pools_mut().into_iter().for_each(|pool| pool.poison(held));
        }
    }
}
