//! Keys, or values, of all layers in the memory of a device.

use super::error::StoreError;
use super::rows::{GpuRows, GpuRowsMut};
use crate::codecs::{codebooks, factors, is_rotatable, magnitudes};
use crate::encoding::{Appended, encode_generics, encode_table, refusal, runs};
use crate::kernels::cache::{PageBytes, copy_rows, read_codes, read_elements};
use crate::kernels::encode::{Rows, append, encode};
use crate::shape::{DIM_STEP, MAX_DIM};
use crate::tensors::dtype_of;
use flashtile_core::cache::{CacheError, Pool, RowRun};
use flashtile_core::codec::{Codec, Coder, Side};
use flashtile_core::dtype::Dtype;
use flashtile_core::plan::Unsupported;
use flashtile_kernel::source::GenericsError;
use flashtile_kernel::{DeviceMemory, Generic, HostAccess, Instance, ScalarType, View, ViewMut};

/// Finds the native code of an instance, for devices that run nothing else.
pub(super) type Find = fn(&Instance) -> Option<Instance>;

/// Makes an instance of a kernel.
type Specialise = fn(&[Generic]) -> Result<Instance, GenericsError>;

/// Runs that one launch takes: a threadgroup coordinate of each.
pub(super) const MAX_RUNS: usize = 32_768;

/// Threadgroups of a run at most; they take its rows in turns.
const MAX_GROUPS: u32 = 2048;

/// SIMD groups of a threadgroup, each of which takes a row at a time.
const SIMDS: u32 = 4;

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
    /// The first row that the encoder did not store: see [`refusal`].
    status: M,
    absent: M,
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

    fn groups(&self, heads: usize) -> [u32; 3] {
        let rows = self.rows.saturating_mul(heads as u32);
        [rows.div_ceil(SIMDS).clamp(1, MAX_GROUPS), self.count, 1]
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
        if codes && (!dim.is_multiple_of(DIM_STEP) || dim > MAX_DIM) {
            let name = if side == Side::Keys { "head_dim" } else { "value_dim" };
            return Err(Unsupported::HeadDim { name, got: dim, step: DIM_STEP, max: MAX_DIM }.into());
        }
        if codes && !is_rotatable(codec, dim) {
            return Err(Unsupported::Rotation { codec, got: dim }.into());
        }
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
            numbers: if codes { u32s(&encode_table(codec))? } else { u32s(&[])? },
            levels: u32s(&magnitudes(codec, dim))?,
            codebooks: f32s(&codebooks(codec, Codec::F32).0)?,
            status: u32s(&[u32::MAX])?,
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

    fn rows(&self, strides: [usize; 4]) -> Rows {
        let [_, heads, page_size, dim] = self.shape;
        let [page, head] = self.strides();
        Rows {
            x: [strides[0], strides[2], strides[1]].map(|n| n as u64),
            pages: [page, head, self.row_bytes].map(|n| n as u64),
            heads: heads as u32,
            dim: dim as u32,
            page: page_size as u32,
            width: 1,
        }
    }

    /// Index of a dtype among the instances, and whether rows are stored as they are.
    fn instance<E>(&self, element: ScalarType) -> Result<(usize, bool), StoreError<E>> {
        let dtype = dtype_of(element).ok_or(StoreError::Element { element })?;
        let index = DTYPES.iter().position(|of| *of == dtype).unwrap_or(0);
        Ok((index, self.codec.dtype() == Some(dtype)))
    }

    /// Checks what is known of rows before they are stored: that there is code for their type, and how many they are.
    pub(super) fn check<E>(&self, rows: &GpuRows<'_, M>) -> Result<(), StoreError<E>> {
        let (index, _) = self.instance(rows.view.element())?;
        made(&self.writers[index])?;
        let (heads, tokens) = (self.shape[1], rows.shape[2]);
        if tokens > max_rows(heads) { Err(size(tokens, heads).into()) } else { Ok(()) }
    }

    /// Panics where runs are outside the pages, which kernels do not check.
    pub(super) fn assert_inside<'r>(&self, mut runs: impl Iterator<Item = &'r RowRun>) {
        let [pages, _, page_size, _] = self.shape;
        let outside = runs.find(|run| run.page >= pages || run.row + run.tokens > page_size);
        assert!(outside.is_none(), "{outside:?} of {pages} pages of {page_size} rows");
    }

    /// Stores rows in a layer, of keys without a mean. The lists are of their runs.
    pub(super) fn write<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        layer: usize,
        lists: &Lists<M>,
        (x, mean): (&GpuRows<'_, M>, Option<&M>),
    ) -> Result<(), StoreError<D::Error>> {
        let (index, same) = self.instance(x.view.element())?;
        let (params, heads) = (self.rows(x.strides), self.shape[1]);
        let groups = lists.groups(heads);
        let (table, runs) = (lists.table.view(), lists.runs.view());
        let pages = self.layers[layer].view_mut();
        let launched = if self.codec.dtype().is_some() {
            append::Call { x: x.view, table, runs, params, pages, same, groups }
                .launch_instance(device, made(&self.writers[index])?)
        } else {
            encode::Call {
                x: x.view,
                means: mean.unwrap_or(&self.absent).view(),
                factors: self.factors.view(),
                numbers: self.numbers.view(),
                table,
                runs,
                params,
                pages,
                status: self.status.view_mut(),
                centered: mean.is_some(),
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
        (x, mean): (&mut GpuRowsMut<'_, M>, Option<&M>),
    ) -> Result<(), StoreError<D::Error>> {
        let (index, same) = self.instance(x.view.element())?;
        let (params, heads) = (self.rows(x.strides), self.shape[1]);
        let groups = lists.groups(heads);
        let (table, runs) = (lists.table.view(), lists.runs.view());
        let (pages, x) = (self.layers[layer].view(), x.view.reborrow());
        let launched = if self.codec.dtype().is_some() {
            read_elements::Call { pages, table, runs, params, x, same, groups }
                .launch_instance(device, made(&self.readers[index])?)
        } else {
            read_codes::Call {
                pages,
                means: mean.unwrap_or(&self.absent).view(),
                factors: self.factors.view(),
                levels: self.levels.view(),
                codebooks: self.codebooks.view(),
                table,
                runs,
                params,
                x,
                centered: mean.is_some(),
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

    /// A page in main memory, of the bytes on the device.
    fn page<D: HostAccess<Memory = M>>(
        &self,
        device: &D,
        layer: usize,
        page: usize,
    ) -> Result<Pool, StoreError<D::Error>> {
        let [_, heads, page_size, dim] = self.shape;
        let mut image = Pool::new(self.codec, self.side, [1, heads, page_size, dim])?;
        let at = page * self.strides()[0];
        device.read(&self.layers[layer], at, image.page_mut(0)).map_err(StoreError::device)?;
        Ok(image)
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
        for run in runs {
            self.page(device, layer, run.page)?.export(RowRun { page: 0, ..*run }, bytes);
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
        for run in runs {
            let mut image = self.page(device, layer, run.page)?;
            image.import(RowRun { page: 0, ..*run }, bytes);
            let at = run.page * self.strides()[0];
            device.write(&mut self.layers[layer], at, image.page_mut(0)).map_err(StoreError::device)?;
        }
        Ok(())
    }

    /// The first row since the last call that was not stored, if there is one. Waits for the device.
    pub(super) fn refused<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
    ) -> Result<Option<CacheError>, StoreError<D::Error>> {
        let mut bytes = [0; 4];
        device.read(&self.status, 0, &mut bytes).map_err(StoreError::device)?;
        let Some((why, [row, head])) = refusal(u32::from_ne_bytes(bytes), self.shape[1] as u32) else {
            return Ok(None);
        };
        device.write(&mut self.status, 0, &u32::MAX.to_ne_bytes()).map_err(StoreError::device)?;
        let tensor = if self.side == Side::Keys { "k" } else { "v" };
        Ok(Some(CacheError::Row { tensor, head: head as usize, row: row as usize, why }))
    }
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
