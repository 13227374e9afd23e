//! Keys, or values, of all layers in the memory of a device.

use super::error::StoreError;
use super::rows::{GpuRows, GpuRowsMut};
use crate::codecs::{codebooks, factors, head_factors, head_factors_len, magnitudes};
use crate::encoding::{Appended, encode_generics, encode_groups, encode_table, refusal, row_groups, runs};
use crate::kernels::cache::{PageBytes, copy_rows, read_codes, read_elements};
use crate::kernels::encode::{Rows, append, encode};
use crate::tensors::dtype_of;
use flashtile_core::cache::{CacheDesc, CacheError, Pool, RowRun};
use flashtile_core::codec::{Codec, Coder, KeyTransform, Side};
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{DeviceMemory, Generic, HostAccess, Instance, ScalarType, Span, View, ViewMut};
use std::ops::Range;

/// Finds the native code of an instance, for devices that run nothing else.
pub(super) type Find = fn(&Instance) -> Option<Instance>;

/// Makes an instance of a kernel.
type Specialise = fn(&[Generic]) -> Result<Instance, GenericsError>;

/// Runs that one launch takes: a threadgroup coordinate of each.
pub(super) const MAX_RUNS: usize = 32_768;

/// Bytes of pages between two others that are copied to main memory with them: that takes less time than a transfer's start.
const MAX_GAP_BYTES: usize = 128 << 10;

/// Bytes of pages that one transfer copies, beyond which a transfer's start no longer counts.
const MAX_SPAN_BYTES: usize = 32 << 20;

const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Pools `[pages, kv_heads, page_size, dim]` of every layer.
#[derive(Debug)]
pub(super) struct GpuPool<M> {
    codec: Codec,
    side: Side,
    shape: [usize; 4],
    row_bytes: usize,
    layers: Vec<M>,
    /// One instance for each of [`DTYPES`].
    writers: [Option<Instance>; 3],
    readers: [Option<Instance>; 3],
    copier: Option<Instance>,
    regions: [u32; 3],
    factors: M,
    /// Tables that the encoder reads.
    numbers: M,
    /// Tables that decoding reads.
    levels: M,
    codebooks: M,
    /// The first row of each layer that the encoder did not store: see [`refusal`].
    status: M,
    absent: M,
}

/// The transform of the keys of a layer, on the device: f32, where there is some.
#[derive(Debug)]
pub(super) struct DeviceTransform<M> {
    /// Means `[kv_heads, head_dim]`.
    pub(super) mean: Option<M>,
    /// [`head_factors`], for queries and for decoding.
    pub(super) factors: Option<M>,
    /// Inverses of the factors `[kv_heads, head_dim]`, for encoding.
    inverses: Option<M>,
}

impl<M> DeviceTransform<M> {
    /// No transform.
    pub(super) const NONE: Self = Self { mean: None, factors: None, inverses: None };

    /// A copy of a transform.
    pub(super) fn new<D: HostAccess<Memory = M>>(
        device: &D,
        desc: &CacheDesc,
        host: &KeyTransform,
    ) -> Result<Self, StoreError<D::Error>> {
        let copied = |list: Option<&[f32]>| {
            list.map(|list| filled(device, ScalarType::F32, &bytes_of(list, f32::to_ne_bytes))).transpose()
        };
        let factors = host.factors().map(|factors| head_factors(desc.k, desc.head_dim, factors));
        Ok(Self {
            mean: copied(host.mean())?,
            factors: copied(factors.as_deref())?,
            inverses: copied(host.inverses())?,
        })
    }
}

/// Lists of a launch over rows, on the device.
#[derive(Debug)]
pub(super) struct Lists<M> {
    /// The runs that the lists hold.
    held: Vec<RowRun>,
    table: M,
    runs: M,
    /// Number and largest size of the runs.
    count: u32,
    rows: u32,
}

fn bytes_of<const N: usize, T: Copy>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| bytes(*value)).collect()
}

/// Memory that holds 32-bit values, at least one.
fn filled<D: HostAccess>(
    device: &D,
    element: ScalarType,
    bytes: &[u8],
) -> Result<D::Memory, StoreError<D::Error>> {
    let mut memory = device.zeroed(element, (bytes.len() / 4).max(1)).map_err(StoreError::device)?;
    device.write(&mut memory, 0, bytes).map_err(StoreError::device)?;
    Ok(memory)
}

impl<M: DeviceMemory> Lists<M> {
    /// The table, the runs as kernels take them, and the largest run.
    fn words<E>(heads: usize, from: &[RowRun]) -> Result<(Vec<u32>, Vec<u32>, u32), StoreError<E>> {
        let appended: Vec<Appended> = from
            .iter()
            .enumerate()
            .map(|(n, run)| Appended {
                batch: 0,
                first: run.at as u32,
                rows: run.tokens as u32,
                sequence: n as u32,
                position: run.row as u32,
            })
            .collect();
        let rows = appended.iter().map(|run| run.rows).max().unwrap_or(0);
        let total = from.iter().map(|run| run.at + run.tokens).max().unwrap_or(0);
        let mut words = runs(&appended, heads as u32)
            .filter(|_| total <= max_rows(heads))
            .ok_or_else(|| size(total, heads))?;
        // A row that is refused has the number that it has in its tensor.
        for (words, run) in words.as_chunks_mut::<8>().0.iter_mut().zip(from) {
            words[5] = run.at as u32;
        }
        Ok((from.iter().map(|run| run.page as u32).collect(), words, rows))
    }

    /// Replaces the lists, unless they are of the same runs, as they are from layer to layer; new memory is taken only where the old is
    /// too small.
    pub(super) fn refill<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        heads: usize,
        from: &[RowRun],
    ) -> Result<(), StoreError<D::Error>> {
        if self.held == from {
            return Ok(());
        }
        let (table, words, rows) = Self::words(heads, from)?;
        self.held.clear();
        for (memory, list) in [(&mut self.table, &table), (&mut self.runs, &words)] {
            if memory.view().len() < list.len() {
                let len = list.len().next_power_of_two();
                *memory = device.zeroed(ScalarType::U32, len).map_err(StoreError::device)?;
            }
            device.write(memory, 0, &bytes_of(list, u32::to_ne_bytes)).map_err(StoreError::device)?;
        }
        (self.count, self.rows) = (from.len() as u32, rows);
        self.held.extend_from_slice(from);
        Ok(())
    }

    /// Lists without runs, with room for a few.
    pub(super) fn empty<D: HostAccess<Memory = M>>(device: &D) -> Result<Self, StoreError<D::Error>> {
        let room = |len| device.zeroed(ScalarType::U32, len).map_err(StoreError::device);
        Ok(Self { held: Vec::new(), table: room(64)?, runs: room(512)?, count: 0, rows: 0 })
    }

    /// Rows of the largest run, of all heads.
    fn rows(&self, heads: usize) -> u32 {
        self.rows.saturating_mul(heads as u32)
    }
}

impl<M: DeviceMemory> GpuPool<M> {
    /// Zeroed pools of a shape.
    pub(super) fn new<D: HostAccess<Memory = M>>(
        device: &D,
        find: Option<Find>,
        (codec, side): (Codec, Side),
        shape: [usize; 4],
        layers: usize,
    ) -> Result<Self, StoreError<D::Error>> {
        let dim = shape[3];
        let codes = codec.dtype().is_none();
        // A device that runs native code has it for some dtypes: rows of others are refused.
        let native = |instance: Instance| find.map_or(Some(instance.clone()), |find| find(&instance));
        let instances = |kernel: [Specialise; 2]| {
            DTYPES.map(|dtype| {
                let [of_codes, of_elements] = kernel;
                let specialise = if codes { of_codes } else { of_elements };
                specialise(&encode_generics(codec, dtype, dim)).ok().and_then(native)
            })
        };
        let [pages, heads, page_size, _] = shape;
        let row_bytes = codec.row_bytes(dim);
        let bytes = pages * heads * page_size * row_bytes;
        let pool = |_| device.zeroed(ScalarType::U8, bytes).map_err(StoreError::device);
        let f32s = |list: &[f32]| filled(device, ScalarType::F32, &bytes_of(list, f32::to_ne_bytes));
        let u32s = |list: &[u32]| filled(device, ScalarType::U32, &bytes_of(list, u32::to_ne_bytes));
        Ok(Self {
            codec,
            side,
            shape,
            row_bytes,
            layers: (0..layers).map(pool).collect::<Result<_, _>>()?,
            writers: instances([encode::specialise, append::specialise]),
            readers: instances([read_codes::specialise, read_elements::specialise]),
            copier: native(copy_rows::instance()),
            regions: regions(codec, dim),
            factors: f32s(&factors(codec, dim))?,
            numbers: if codes { u32s(&encode_table(codec, dim))? } else { u32s(&[])? },
            levels: u32s(&magnitudes(codec, dim))?,
            codebooks: f32s(&codebooks(codec, Codec::F32).0)?,
            status: u32s(&vec![u32::MAX; layers])?,
            absent: f32s(&[])?,
        })
    }

    /// The pages of a layer, as bytes.
    pub(super) fn layer(&self, layer: usize) -> &M {
        &self.layers[layer]
    }

    pub(super) const fn shape(&self) -> [usize; 4] {
        self.shape
    }

    pub(super) const fn codec(&self) -> Codec {
        self.codec
    }

    pub(super) const fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes from page to page, and from head to head.
    pub(super) const fn strides(&self) -> [usize; 2] {
        let [_, heads, page_size, _] = self.shape;
        let head = page_size * self.row_bytes;
        [heads * head, head]
    }

    fn params(&self, strides: [usize; 4], factor_stride: usize) -> Rows {
        let [_, heads, page_size, dim] = self.shape;
        let [page, head] = self.strides();
        Rows {
            x: [strides[0], strides[2], strides[1]].map(|n| n as u64),
            pages: [page, head, self.row_bytes].map(|n| n as u64),
            heads: heads as u32,
            dim: dim as u32,
            page: page_size as u32,
            width: 1,
            factor_stride: factor_stride as u64,
        }
    }

    /// Index of a dtype among the instances, and whether rows are stored as they are.
    fn instance<E>(&self, element: ScalarType) -> Result<(usize, bool), StoreError<E>> {
        let dtype = dtype_of(element).ok_or(StoreError::Element { element })?;
        let index = DTYPES.iter().position(|of| *of == dtype).unwrap_or(0);
        Ok((index, self.codec.dtype() == Some(dtype)))
    }

    /// Checks rows before they are stored: there is code for their type, they are not too many, and their
    /// memory holds them.
    pub(super) fn check<E>(&self, rows: &GpuRows<'_, M>) -> Result<(), StoreError<E>> {
        let (index, _) = self.instance(rows.view.element())?;
        made(&self.writers[index])?;
        rows.check().map_err(StoreError::Memory)?;
        let (heads, tokens) = (self.shape[1], rows.shape[2]);
        if tokens > max_rows(heads) { Err(size(tokens, heads).into()) } else { Ok(()) }
    }

    /// Panics where runs are outside the pages, which kernels do not check.
    pub(super) fn assert_inside<'r>(&self, mut runs: impl Iterator<Item = &'r RowRun>) {
        let [pages, _, page_size, _] = self.shape;
        let outside = runs.find(|run| run.page >= pages || run.row + run.tokens > page_size);
        assert!(outside.is_none(), "{outside:?} of {pages} pages of {page_size} rows");
    }

    /// Stores rows in a layer, of keys after their transform. The lists are of their runs.
    pub(super) fn write<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        layer: usize,
        lists: &Lists<M>,
        (x, transform): (&GpuRows<'_, M>, &DeviceTransform<M>),
    ) -> Result<(), StoreError<D::Error>> {
        let (index, same) = self.instance(x.view.element())?;
        let (params, heads) = (self.params(x.strides, 0), self.shape[1]);
        let groups = [encode_groups(self.codec, self.shape[3], lists.rows(heads)), lists.count, 1];
        let (table, runs) = (lists.table.view(), lists.runs.view());
        let pages = self.layers[layer].view_mut();
        let status = Span { element: ScalarType::U32, offset: layer, len: 1 };
        let launched = if self.codec.dtype().is_some() {
            append::Call { x: x.view, table, runs, params, pages, same, groups }
                .launch_instance(device, made(&self.writers[index])?)
        } else {
            encode::Call {
                x: x.view,
                means: transform.mean.as_ref().unwrap_or(&self.absent).view(),
                inverses: transform.inverses.as_ref().unwrap_or(&self.absent).view(),
                factors: self.factors.view(),
                numbers: self.numbers.view(),
                table,
                runs,
                params,
                pages,
                status: ViewMut::new(&mut self.status, status),
                centered: transform.mean.is_some(),
                equalized: transform.inverses.is_some(),
                unbiased: self.side == Side::Keys,
                groups,
            }
            .launch_instance(device, made(&self.writers[index])?)
        };
        launched.map_err(StoreError::Launch)
    }

    /// Fills rows from a layer. The lists are of their runs.
    pub(super) fn read<D: HostAccess<Memory = M>>(
        &self,
        device: &D,
        layer: usize,
        lists: &Lists<M>,
        (x, transform): (&mut GpuRowsMut<'_, M>, &DeviceTransform<M>),
    ) -> Result<(), StoreError<D::Error>> {
        let (index, same) = self.instance(x.view.element())?;
        let stride = transform.factors.as_ref().map_or(0, |_| head_factors_len(self.codec, self.shape[3]));
        let (params, heads) = (self.params(x.strides, stride), self.shape[1]);
        let groups = [row_groups(lists.rows(heads)), lists.count, 1];
        let (table, runs) = (lists.table.view(), lists.runs.view());
        let (pages, x) = (self.layers[layer].view(), x.view.reborrow());
        let launched = if self.codec.dtype().is_some() {
            read_elements::Call { pages, table, runs, params, x, same, groups }
                .launch_instance(device, made(&self.readers[index])?)
        } else {
            read_codes::Call {
                pages,
                means: transform.mean.as_ref().unwrap_or(&self.absent).view(),
                factors: transform.factors.as_ref().unwrap_or(&self.factors).view(),
                levels: self.levels.view(),
                codebooks: self.codebooks.view(),
                table,
                runs,
                params,
                x,
                centered: transform.mean.is_some(),
                groups,
            }
            .launch_instance(device, made(&self.readers[index])?)
        };
        launched.map_err(StoreError::Launch)
    }

    /// Copies rows between pages, in all layers. `copies` has four words of each of `count` copies.
    pub(super) fn copy<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        copies: View<'_, M>,
        count: u32,
    ) -> Result<(), StoreError<D::Error>> {
        let [page, head] = self.strides().map(|n| n as u64);
        let params = PageBytes { page, head, row: self.regions, tokens: self.shape[2] as u32 };
        let groups = [self.shape[1] as u32, count, 1];
        for layer in &mut self.layers {
            let pages: ViewMut<'_, M> = layer.view_mut();
            copy_rows::Call { copies, params, pages, groups }
                .launch_instance(device, made(&self.copier)?)
                .map_err(StoreError::Launch)?;
        }
        Ok(())
    }

    /// A pool in main memory for as many pages.
    fn image(&self, pages: usize) -> Result<Pool, CacheError> {
        let [_, heads, page_size, dim] = self.shape;
        Pool::new(self.codec, self.side, [pages, heads, page_size, dim])
    }

    /// The most pages that one transfer copies.
    fn max_span(&self) -> usize {
        (MAX_SPAN_BYTES / self.strides()[0]).max(1)
    }

    /// Bytes of `tokens` tokens in a layer.
    pub(super) const fn bytes_of(&self, tokens: usize) -> usize {
        self.shape[1] * tokens * self.row_bytes
    }

    /// Copies rows of a layer to dense bytes `[heads, tokens, row]`.
    pub(super) fn export<D: HostAccess<Memory = M>>(
        &self,
        device: &D,
        layer: usize,
        runs: &[RowRun],
        bytes: &mut [u8],
    ) -> Result<(), StoreError<D::Error>> {
        let page_bytes = self.strides()[0];
        for (pages, runs) in spans(runs, MAX_GAP_BYTES / page_bytes, self.max_span()) {
            let mut image = self.image(pages.len())?;
            let at = pages.start * page_bytes;
            device.read(&self.layers[layer], at, image.pages_mut()).map_err(StoreError::device)?;
            runs.iter().for_each(|run| image.export(within(&pages, run), bytes));
        }
        Ok(())
    }

    /// Copies rows of dense bytes `[heads, tokens, row]` to a layer.
    pub(super) fn import<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        layer: usize,
        runs: &[RowRun],
        bytes: &[u8],
    ) -> Result<(), StoreError<D::Error>> {
        // Pages of others are not written, not even with their own bytes.
        for (pages, runs) in spans(runs, 0, self.max_span()) {
            let mut image = self.image(pages.len())?;
            let (at, memory) = (pages.start * self.strides()[0], &mut self.layers[layer]);
            if runs.iter().any(|run| run.tokens < self.shape[2]) {
                device.read(memory, at, image.pages_mut()).map_err(StoreError::device)?;
            }
            runs.iter().for_each(|run| image.import(within(&pages, run), bytes));
            device.write(memory, at, image.pages_mut()).map_err(StoreError::device)?;
        }
        Ok(())
    }

    /// The first row since the last call that was not stored in the first layer that has any. Waits for the device.
    pub(super) fn refused<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
    ) -> Result<Option<CacheError>, StoreError<D::Error>> {
        let mut bytes = vec![0; 4 * self.layers.len()];
        device.read(&self.status, 0, &mut bytes).map_err(StoreError::device)?;
        let (status, _) = bytes.as_chunks();
        let of_layer = |&status| refusal(u32::from_ne_bytes(status), self.shape[1] as u32);
        let first = status.iter().map(of_layer).enumerate().find_map(|(layer, found)| Some((layer, found?)));
        let Some((layer, (why, [row, head]))) = first else {
            return Ok(None);
        };
        bytes.fill(0xFF);
        device.write(&mut self.status, 0, &bytes).map_err(StoreError::device)?;
        let tensor = if self.side == Side::Keys { "k" } else { "v" };
        Ok(Some(CacheError::Row { layer, tensor, head: head as usize, row: row as usize, why }))
    }
}

/// Runs by ranges of pages that one transfer copies, of at most `max` pages: ranges lie more than `gap` pages apart, or are full.
fn spans(runs: &[RowRun], gap: usize, max: usize) -> Vec<(Range<usize>, Vec<RowRun>)> {
    let mut runs = runs.to_vec();
    runs.sort_unstable_by_key(|run| run.page);
    let mut spans: Vec<(Range<usize>, Vec<RowRun>)> = Vec::new();
    for run in runs {
        let end = run.page + 1;
        match spans.last_mut() {
            Some((pages, of_pages)) if run.page <= pages.end + gap && end - pages.start <= max => {
                pages.end = end;
                of_pages.push(run);
            }
            _ => spans.push((run.page..end, vec![run])),
        }
    }
    spans
}

/// A run in a copy of some pages.
const fn within(pages: &Range<usize>, run: &RowRun) -> RowRun {
    RowRun { page: run.page - pages.start, ..*run }
}

/// An instance, if the device has it.
fn made<E>(instance: &Option<Instance>) -> Result<&Instance, StoreError<E>> {
    let why = || Unsupported::Instance { why: "the device has no code for rows of this type".to_owned() };
    instance.as_ref().ok_or_else(|| why().into())
}

/// The most rows of a tensor with `heads` heads: kernels count them in 31 bits.
const fn max_rows(heads: usize) -> usize {
    ((1 << 31) - 1) / if heads == 0 { 1 } else { heads }
}

fn size(got: usize, heads: usize) -> Unsupported {
    Unsupported::Size { what: "rows of a write", got, max: max_rows(heads) }
}

/// Bytes of a row in the regions of a page.
fn regions(codec: Codec, dim: usize) -> [u32; 3] {
    match Coder::new(codec, dim) {
        None => [codec.row_bytes(dim) as u32, 0, 0],
        Some(coder) => {
            let mut regions = [0; 3];
            for (bytes, place) in regions.iter_mut().zip(coder.format().places(1, 0..1)) {
                *bytes = place.len() as u32;
            }
            regions
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_copy_neighbouring_pages() {
        let run = |page, tokens| RowRun { page, row: 0, tokens, at: 0 };
        let pages = |pages: &[usize], gap, max| -> Vec<Range<usize>> {
            let runs: Vec<RowRun> = pages.iter().map(|&page| run(page, 1)).collect();
            let spans = spans(&runs, gap, max);
            assert_eq!(spans.iter().map(|(_, runs)| runs.len()).sum::<usize>(), runs.len());
            assert!(spans.iter().all(|(pages, runs)| runs.iter().all(|run| pages.contains(&run.page))));
            spans.into_iter().map(|(pages, _)| pages).collect()
        };
        assert_eq!(pages(&[], 0, 9), []);
        // In any order, and a ring's page twice.
        assert_eq!(pages(&[5, 3, 4, 9, 9], 0, 9), [3..6, 9..10]);
        assert_eq!(pages(&[0, 2, 4, 8], 1, 9), [0..5, 8..9]);
        assert_eq!(pages(&[0, 1, 2, 3, 4], 0, 2), [0..2, 2..4, 4..5]);
        assert_eq!(pages(&[0, 0, 1], 0, 1), [0..1, 1..2]);
    }
}
