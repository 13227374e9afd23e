//! The bytes of a cache in main memory.

use super::desc::CacheDesc;
use super::error::CacheError;
use super::page_store::PageStore;
use super::table::{PageCopy, RowRun, Run};
use crate::codec::key_transform::IDENTITY;
use crate::codec::{CodePages, Codec, KeyTransform, KvView, Side, convert};
use crate::dtype::Dtype;
use crate::limits::MAX_HEAD_DIM;
use crate::memory::Zeroed;
use crate::problem::KvStorage;
use crate::tensor::dense;
use crate::tensor::{TensorView, TensorViewMut};

/// K or V of one layer in main memory: `[pages, heads, page, dim]`.
#[derive(Debug)]
pub struct Pool {
    shape: [usize; 4],
    row_bytes: usize,
    rows: Rows,
}

#[derive(Debug)]
enum Rows {
    /// Plain elements, row-major.
    Elements(Zeroed, Dtype),
    Codes(Box<CodePages>),
}

impl Pool {
    /// Zeroed pages of a codec, for a shape of a validated description.
    ///
    /// # Errors
    /// [`CacheError::Memory`].
    pub fn new(codec: Codec, side: Side, shape: [usize; 4]) -> Result<Self, CacheError> {
        let [pages, heads, page, dim] = shape;
        let row_bytes = codec.row_bytes(dim);
        // The description is validated, so this does not overflow.
        let bytes = pages * heads * page * row_bytes;
        let memory = CacheError::Memory { bytes };
        let rows = match codec.dtype() {
            Some(dtype) => Rows::Elements(Zeroed::new(bytes).ok_or(memory)?, dtype),
            None => Rows::Codes(Box::new(CodePages::new(codec, side, shape).map_err(|_| memory)?)),
        };
        Ok(Self { shape, row_bytes, rows })
    }

    /// First byte of a row of plain elements.
    const fn at(&self, page: usize, head: usize, row: usize) -> usize {
        first_byte(self.shape, self.row_bytes, [page, head, row])
    }

    const fn heads(&self) -> usize {
        self.shape[1]
    }

    /// The bytes of all pages, each of all heads.
    pub fn pages_mut(&mut self) -> &mut [u8] {
        match &mut self.rows {
            Rows::Elements(memory, _) => memory,
            Rows::Codes(codes) => codes.pages_mut(),
        }
    }

    /// The rows as an input of attention.
    pub(super) fn kv_view(&self) -> KvView<'_> {
        match &self.rows {
            Rows::Elements(memory, dtype) => {
                // Size and alignment are right: the description is validated, and the memory starts on a cache line.
                let view = TensorView::from_bytes(*dtype, memory, self.shape, dense(self.shape));
                KvView::Elements(view.unwrap_or_else(|_| unreachable!("a pool is a tensor")))
            }
            Rows::Codes(codes) => KvView::Codes(codes.view()),
        }
    }

    /// The quantized rows; `None` if they are plain elements.
    pub(super) const fn codes(&self) -> Option<&CodePages> {
        match &self.rows {
            Rows::Elements(..) => None,
            Rows::Codes(codes) => Some(codes),
        }
    }

    /// Like [`Pool::codes`].
    pub(super) const fn codes_mut(&mut self) -> Option<&mut CodePages> {
        match &mut self.rows {
            Rows::Elements(..) => None,
            Rows::Codes(codes) => Some(codes),
        }
    }

    /// Stores rows of a tensor `[1, heads, tokens, dim]`. Rows to be quantized have been checked.
    fn write(&mut self, run: RowRun, tensor: &TensorView<'_>) {
        let (shape, row_bytes, from) = (self.shape, self.row_bytes, run.at);
        match &mut self.rows {
            Rows::Elements(memory, dtype) => {
                for head in 0..shape[1] {
                    let at = first_byte(shape, row_bytes, [run.page, head, run.row]);
                    let rows = &mut memory[at..at + run.tokens * row_bytes];
                    for (row, into) in rows.chunks_exact_mut(row_bytes).enumerate() {
                        convert::convert(
                            tensor.dtype(),
                            tensor.row_bytes([0, head, from + row]),
                            *dtype,
                            into,
                        );
                    }
                }
            }
            Rows::Codes(codes) => codes.write(run.page, run.row..run.row + run.tokens, tensor, from),
        }
    }

    /// Reads rows into a tensor `[1, heads, tokens, dim]`, or as many of their first elements as it has columns.
    fn read(&self, run: RowRun, tensor: &mut TensorViewMut<'_>) {
        let (dtype, columns) = (tensor.dtype(), tensor.shape()[3]);
        let mut x = [0.0f32; MAX_HEAD_DIM];
        let x = &mut x[..self.shape[3]];
        for head in 0..self.heads() {
            let at = self.at(run.page, head, run.row);
            for row in 0..run.tokens {
                let into = tensor.row_bytes_mut([0, head, run.at + row]);
                match &self.rows {
                    Rows::Elements(memory, from) => {
                        convert::convert(
                            *from,
                            &memory[at + row * self.row_bytes..][..columns * from.bytes()],
                            dtype,
                            into,
                        );
                    }
                    Rows::Codes(codes) => {
                        codes.read(run.page, head, run.row + row, x);
                        convert::from_f32(&x[..columns], dtype, into);
                    }
                }
            }
        }
    }

    /// Bytes of `tokens` tokens.
    #[must_use]
    pub const fn bytes_of(&self, tokens: usize) -> usize {
        self.heads() * tokens * self.row_bytes
    }

    /// Copies rows of the pool to dense bytes `[heads, tokens, row]`.
    pub fn export(&self, run: RowRun, bytes: &mut [u8]) {
        let head_bytes = bytes.len() / self.heads();
        for (head, bytes) in bytes.chunks_exact_mut(head_bytes).enumerate() {
            let bytes = &mut bytes[run.at * self.row_bytes..][..run.tokens * self.row_bytes];
            match &self.rows {
                Rows::Elements(memory, _) => {
                    let from = self.at(run.page, head, run.row);
                    bytes.copy_from_slice(&memory[from..from + bytes.len()]);
                }
                Rows::Codes(codes) => {
                    for (row, into) in bytes.chunks_exact_mut(self.row_bytes).enumerate() {
                        codes.export(run.page, head, run.row + row, into);
                    }
                }
            }
        }
    }

    /// Copies rows of dense bytes `[heads, tokens, row]` to the pool.
    pub fn import(&mut self, run: RowRun, bytes: &[u8]) {
        let head_bytes = bytes.len() / self.heads();
        for (head, bytes) in bytes.chunks_exact(head_bytes).enumerate() {
            let bytes = &bytes[run.at * self.row_bytes..][..run.tokens * self.row_bytes];
            let to = self.at(run.page, head, run.row);
            match &mut self.rows {
                Rows::Elements(memory, _) => memory[to..to + bytes.len()].copy_from_slice(bytes),
                Rows::Codes(codes) => {
                    for (row, from) in bytes.chunks_exact(self.row_bytes).enumerate() {
                        codes.import(run.page, head, run.row + row, from);
                    }
                }
            }
        }
    }

    /// Copies rows from a slot `[1, heads, capacity, dim]` in the same codec, whose row `j % capacity` is token `j`.
    /// `first` is the first token of the run.
    pub(super) fn load(&mut self, run: Run, first: usize, slot: &KvView<'_>) {
        let (shape, row_bytes, capacity) = (self.shape, self.row_bytes, slot.shape()[2]);
        let mut bytes = vec![0u8; row_bytes];
        for (head, token) in (0..shape[1]).flat_map(|head| (0..run.tokens).map(move |token| (head, token))) {
            let (row, from) = (run.row + token, (first + token) % capacity);
            match (&mut self.rows, slot) {
                (Rows::Elements(memory, _), KvView::Elements(view)) => {
                    let at = first_byte(shape, row_bytes, [run.page, head, row]);
                    memory[at..at + row_bytes].copy_from_slice(view.row_bytes([0, head, from]));
                }
                (Rows::Codes(codes), KvView::Codes(view)) => {
                    view.export(0, head, from, &mut bytes);
                    codes.import(run.page, head, row, &bytes);
                }
                (Rows::Elements(..), KvView::Codes(_)) | (Rows::Codes(_), KvView::Elements(_)) => {
                    unreachable!("the codecs of the slot were checked")
                }
            }
        }
    }

    fn copy(&mut self, copy: &PageCopy) {
        let (shape, row_bytes) = (self.shape, self.row_bytes);
        match &mut self.rows {
            Rows::Elements(memory, _) => {
                for head in 0..shape[1] {
                    let at = |page| first_byte(shape, row_bytes, [page, head, copy.rows.start]);
                    let (from, to) = (at(copy.from), at(copy.to));
                    memory.copy_within(from..from + copy.rows.len() * row_bytes, to);
                }
            }
            Rows::Codes(codes) => codes.copy([copy.from, copy.to], copy.rows.clone()),
        }
    }

    #[cfg(feature = "testkit")]
    fn poison(&mut self, held: &[bool]) {
        let (shape, row_bytes) = (self.shape, self.row_bytes);
        for (row, _) in held.iter().enumerate().filter(|(_, held)| !**held) {
            let (page, row) = (row / shape[2], row % shape[2]);
            match &mut self.rows {
                Rows::Elements(memory, _) => {
                    for head in 0..shape[1] {
                        let at = first_byte(shape, row_bytes, [page, head, row]);
                        memory[at..at + row_bytes].fill(0xFF);
                    }
                }
                Rows::Codes(codes) => codes.poison(page, row),
            }
        }
    }
}

/// First byte of a row of plain elements in pages of a shape.
const fn first_byte(shape: [usize; 4], row_bytes: usize, [page, head, row]: [usize; 3]) -> usize {
    ((page * shape[1] + head) * shape[2] + row) * row_bytes
}

/// K and V of one layer.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) k: Pool,
    /// `None` where values are columns of the keys.
    pub(super) v: Option<Pool>,
    value_dim: usize,
}

impl Layer {
    /// Keys and values as inputs of attention.
    pub(super) fn kv_views(&self) -> (KvView<'_>, KvView<'_>) {
        let k = self.k.kv_view();
        (k, self.v.as_ref().map_or_else(|| k.columns(self.value_dim), Pool::kv_view))
    }

    /// The pools: of keys, then of values that have rows of their own.
    fn pools(&self) -> impl Iterator<Item = &Pool> {
        std::iter::once(&self.k).chain(&self.v)
    }

    /// [`Layer::pools`].
    fn pools_mut(&mut self) -> impl Iterator<Item = &mut Pool> {
        std::iter::once(&mut self.k).chain(&mut self.v)
    }
}

/// K and V of every layer in main memory.
#[derive(Debug)]
pub struct HostStore {
    desc: CacheDesc,
    pub(super) layers: Vec<Layer>,
}

impl HostStore {
    /// Zeroed pools for a validated description.
    pub(super) fn new(desc: &CacheDesc) -> Result<Self, CacheError> {
        let mut layers = Vec::new();
        super::table::reserve(&mut layers, desc.layers)?;
        let [k_shape, v_shape] = desc.pools();
        for _ in 0..desc.layers {
            let k = Pool::new(desc.k, Side::Keys, k_shape)?;
            let v = match desc.kv_storage {
                KvStorage::Separate => Some(Pool::new(desc.v, Side::Values, v_shape)?),
                KvStorage::KeyColumns => None,
            };
            layers.push(Layer { k, v, value_dim: desc.value_dim });
        }
        Ok(Self { desc: *desc, layers })
    }

    /// Fills the rows `[pages, page]` without a token with NaN.
    #[cfg(feature = "testkit")]
    pub(super) fn poison(&mut self, held: &[bool]) {
        for layer in &mut self.layers {
            layer.pools_mut().for_each(|pool| pool.poison(held));
        }
    }
}

impl PageStore for HostStore {
    type Error = CacheError;
    type Rows<'a> = TensorView<'a>;
    type RowsMut<'a> = TensorViewMut<'a>;

    fn map_refusal(error: CacheError, map: impl FnOnce(CacheError) -> CacheError) -> CacheError {
        map(error)
    }

    fn sibling(&self, desc: &CacheDesc) -> Result<Self, CacheError> {
        Self::new(desc)
    }

    fn desc(&self) -> &CacheDesc {
        &self.desc
    }

    fn shape(rows: &TensorView<'_>) -> [usize; 4] {
        rows.shape()
    }

    fn shape_mut(rows: &TensorViewMut<'_>) -> [usize; 4] {
        rows.shape()
    }

    fn check(&self, layer: usize, k: &TensorView<'_>, v: &TensorView<'_>) -> Result<(), CacheError> {
        let of = &self.layers[layer];
        if of.v.is_none() && !v.is_first_columns_of(k) {
            return Err(CacheError::NotKeyColumns);
        }
        let refused = |tensor| {
            move |(why, [head, row]): (_, [usize; 2])| CacheError::Row { layer, tensor, head, row, why }
        };
        if let Some(codes) = of.k.codes() {
            CodePages::check(k, codes.key_transform()).map_err(refused("k"))?;
        }
        if of.v.as_ref().and_then(Pool::codes).is_some() {
            CodePages::check(v, &IDENTITY).map_err(refused("v"))?;
        }
        Ok(())
    }

    fn key_transform(&self, layer: usize) -> &KeyTransform {
        self.layers[layer].k.codes().map_or(&IDENTITY, CodePages::key_transform)
    }

    fn set_key_transform(&mut self, layer: usize, transform: KeyTransform) -> Result<(), CacheError> {
        if let Some(codes) = self.layers[layer].k.codes_mut() {
            codes.set_key_transform(transform);
        }
        Ok(())
    }

    fn check_stored(&mut self) -> Result<(), CacheError> {
        Ok(())
    }

    fn copy(&mut self, copies: &[PageCopy]) -> Result<(), CacheError> {
        for pool in self.layers.iter_mut().flat_map(Layer::pools_mut) {
            copies.iter().for_each(|copy| pool.copy(copy));
        }
        Ok(())
    }

    fn write(
        &mut self,
        layer: usize,
        runs: &[RowRun],
        k: &TensorView<'_>,
        v: &TensorView<'_>,
    ) -> Result<(), CacheError> {
        let Layer { k: k_pool, v: v_pool, .. } = &mut self.layers[layer];
        for run in runs {
            k_pool.write(*run, k);
            if let Some(pool) = v_pool {
                pool.write(*run, v);
            }
        }
        Ok(())
    }

    fn read(
        &self,
        layer: usize,
        runs: &[RowRun],
        k: &mut TensorViewMut<'_>,
        v: &mut TensorViewMut<'_>,
    ) -> Result<(), CacheError> {
        let of = &self.layers[layer];
        for run in runs {
            of.k.read(*run, k);
            of.v.as_ref().unwrap_or(&of.k).read(*run, v);
        }
        Ok(())
    }

    fn export(&self, runs: &[RowRun], tokens: usize, bytes: &mut [u8]) -> Result<(), CacheError> {
        let mut rest = bytes;
        for pool in self.layers.iter().flat_map(Layer::pools) {
            let (section, after) = rest.split_at_mut(pool.bytes_of(tokens));
            runs.iter().for_each(|run| pool.export(*run, section));
            rest = after;
        }
        Ok(())
    }

    fn import(&mut self, runs: &[RowRun], tokens: usize, bytes: &[u8]) -> Result<(), CacheError> {
        let mut rest = bytes;
        for pool in self.layers.iter_mut().flat_map(Layer::pools_mut) {
            let (section, after) = rest.split_at(pool.bytes_of(tokens));
            runs.iter().for_each(|run| pool.import(*run, section));
            rest = after;
        }
        Ok(())
    }
}
