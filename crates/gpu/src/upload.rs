//! Tensors of the host, copied to the memory of a device and back.

use crate::array::rows;
use crate::codecs::{head_factors, scalar_type};
use crate::tensors::{
    GpuInputs, GpuKeptInputs, GpuKeptPages, GpuKv, GpuMask, GpuOutputs, GpuTables, GpuTensor, GpuTensorMut,
};
use flashtile_core::block_tables::BlockTables;
use flashtile_core::codec::{Codec, KvView};
use flashtile_core::dtype::{Dtype, MaskKind};
use flashtile_core::inputs::{Inputs, KeptInputs, KeptPages, Outputs};
use flashtile_core::tensor::{MaskView, TensorView, TensorViewMut, dense, reach};
use flashtile_kernel::{DeviceMemory, HostAccess, ScalarType, bf16, f16};

/// Pages of codes start at multiples of this many bytes, so that they are read in vectors.
const PAGE_ALIGN: usize = 16;

/// Copies of the inputs of a run, in device memory that they own.
///
/// Tensors without gaps between their elements keep their strides; others become dense.
#[derive(Debug)]
pub struct Uploaded<M> {
    q: Elements<M>,
    k: Kv<M>,
    v: Kv<M>,
    tables: Option<Tables<M>>,
    /// The first and the last tokens that are kept in 16 bits.
    kept: [Option<Kept<M>>; 2],
    tree: Option<Mask<M>>,
    mask: Option<Mask<M>>,
    alibi_slopes: Option<M>,
    sinks: Option<M>,
}

/// A tensor `[batch, heads, rows, dim]`.
#[derive(Debug)]
struct Elements<M> {
    memory: M,
    shape: [usize; 4],
    strides: [usize; 4],
}

/// Keys or values.
#[derive(Debug)]
struct Kv<M> {
    memory: M,
    codec: Codec,
    shape: [usize; 4],
    /// In bytes.
    strides: [usize; 3],
    means: Option<M>,
    factors: Option<M>,
}

/// A block table.
#[derive(Debug)]
struct Tables<M> {
    memory: M,
    width: usize,
    page_size: usize,
    wraps: bool,
}

/// Keys and values of kept tokens.
#[derive(Debug)]
struct Kept<M> {
    k: Kv<M>,
    v: Kv<M>,
    tables: Option<Tables<M>>,
}

impl<M> Kept<M> {
    fn new<D: HostAccess<Memory = M>>(
        device: &D,
        pages: Option<KeptPages<'_>>,
        placement: Placement,
    ) -> Result<Option<Self>, D::Error> {
        let Some(KeptPages { k, v, .. }) = pages else { return Ok(None) };
        let (k, v) = (Kv::new(device, &k, placement)?, Kv::new(device, &v, placement)?);
        Ok(Some(Self { k, v, tables: None }))
    }
}

/// A mask.
#[derive(Debug)]
pub(crate) struct Mask<M> {
    memory: M,
    kind: MaskKind,
    shape: [usize; 4],
    strides: [usize; 4],
}

/// How copies lie in the memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Placement {
    /// Pages of codes start at multiples of this many bytes; 1 places them one right after another.
    pub page_align: usize,
    /// True if tensors and masks keep their own strides: gaps between elements then hold NaN. Otherwise
    /// tensors without gaps keep their strides, and others become dense.
    pub own_strides: bool,
}

impl Default for Placement {
    fn default() -> Self {
        Self { page_align: PAGE_ALIGN, own_strides: false }
    }
}

impl Placement {
    /// Strides of a copy, and the elements that it reaches over. An axis of a single index, whose stride may be anything, gets 0.
    fn strides(self, shape: [usize; 4], strides: [usize; 4]) -> ([usize; 4], usize) {
        let strides: [usize; 4] = std::array::from_fn(|axis| if shape[axis] > 1 { strides[axis] } else { 0 });
        let elements = shape.iter().product();
        match reach(shape, strides) {
            Ok(reach) if self.own_strides || reach <= elements => {
                ([strides[0], strides[1], strides[2], 1], reach)
            }
            _ => (dense(shape), elements),
        }
    }
}

/// Where a row starts, in elements.
fn start([b, h, row]: [usize; 3], strides: [usize; 4]) -> usize {
    b * strides[0] + h * strides[1] + row * strides[2]
}

/// The bytes of a copy of a tensor, with these strides, that reaches over `reach` elements.
fn bytes_of(view: &TensorView<'_>, (strides, reach): ([usize; 4], usize)) -> Vec<u8> {
    let size = view.dtype().bytes();
    let mut bytes = vec![0xFF; reach * size];
    for row in rows(view.shape()) {
        let from = view.row_bytes(row);
        bytes[start(row, strides) * size..][..from.len()].copy_from_slice(from);
    }
    bytes
}

fn filled<D: HostAccess>(device: &D, element: ScalarType, bytes: &[u8]) -> Result<D::Memory, D::Error> {
    let mut memory = device.uninit(element, bytes.len() / element.bytes())?;
    device.write(&mut memory, 0, bytes)?;
    Ok(memory)
}

pub(crate) fn list<D: HostAccess>(device: &D, list: &[f32]) -> Result<D::Memory, D::Error> {
    let bytes: Vec<u8> = list.iter().flat_map(|x| x.to_ne_bytes()).collect();
    filled(device, ScalarType::F32, &bytes)
}

/// Copies the f32 of a memory to a list that is no longer, after all work of the device before has ended.
pub(crate) fn read_list<D: HostAccess>(
    device: &D,
    memory: &D::Memory,
    list: &mut [f32],
) -> Result<(), D::Error> {
    let mut bytes = vec![0u8; list.len() * 4];
    device.read(memory, 0, &mut bytes)?;
    for (to, from) in list.iter_mut().zip(bytes.as_chunks().0) {
        *to = f32::from_ne_bytes(*from);
    }
    Ok(())
}

impl<M> Kv<M> {
    fn new<D: HostAccess<Memory = M>>(
        device: &D,
        view: &KvView<'_>,
        placement: Placement,
    ) -> Result<Self, D::Error> {
        let (codec, shape) = (view.codec(), view.shape());
        let (bytes, strides) = match view {
            KvView::Elements(view) => {
                let copied = placement.strides(shape, view.strides());
                let [batch, head, row, _] = copied.0.map(|stride| stride * view.dtype().bytes());
                (bytes_of(view, copied), [batch, head, row])
            }
            KvView::Codes(codes) => {
                let [pages, heads, ..] = shape;
                let places = || (0..pages).flat_map(|page| (0..heads).map(move |head| (page, head)));
                let page = places().next().map_or(0, |(page, head)| codes.page(page, head).len());
                let stride = page.next_multiple_of(placement.page_align);
                let mut bytes = vec![0xFF; pages * heads * stride];
                for ((page, head), to) in places().zip(bytes.chunks_exact_mut(stride.max(1))) {
                    let from = codes.page(page, head);
                    to[..from.len()].copy_from_slice(from);
                }
                (bytes, [heads * stride, stride, 0])
            }
        };
        let transform = view.key_transform();
        let list = |values: Option<&[f32]>| values.map(|values| list(device, values)).transpose();
        let factors = transform.factors().map(|factors| head_factors(codec, shape[3], factors));
        Ok(Self {
            memory: filled(device, ScalarType::U8, &bytes)?,
            codec,
            shape,
            strides,
            means: list(transform.mean())?,
            factors: list(factors.as_deref())?,
        })
    }
}

impl<M: DeviceMemory> Tables<M> {
    /// A copy of block tables, over an old one where that has the same size.
    fn new<D: HostAccess<Memory = M>>(
        device: &D,
        tables: &BlockTables,
        old: Option<Self>,
    ) -> Result<Self, D::Error> {
        let bytes: Vec<u8> = tables.table.iter().flat_map(|page| page.to_ne_bytes()).collect();
        let BlockTables { width, page_size, wraps, .. } = *tables;
        let memory = match old {
            Some(Self { mut memory, .. }) if memory.view().len() == tables.table.len() => {
                device.write(&mut memory, 0, &bytes)?;
                memory
            }
            _ => filled(device, ScalarType::U32, &bytes)?,
        };
        Ok(Self { memory, width, page_size, wraps })
    }

    fn view(&self) -> GpuTables<'_, M> {
        let Self { memory, width, page_size, wraps } = self;
        GpuTables { table: memory.view(), width: *width, page_size: *page_size, wraps: *wraps }
    }
}

impl<M: DeviceMemory> Kv<M> {
    fn view(&self) -> GpuKv<'_, M> {
        let Self { memory, codec, shape, strides, means, factors } = self;
        GpuKv {
            bytes: memory.view(),
            codec: *codec,
            shape: *shape,
            strides: *strides,
            means: means.as_ref().map(M::view),
            factors: factors.as_ref().map(M::view),
        }
    }
}

impl<M> Mask<M> {
    pub(crate) fn new<D: HostAccess<Memory = M>>(
        device: &D,
        mask: &MaskView<'_>,
        placement: Placement,
    ) -> Result<Self, D::Error> {
        let (kind, shape) = (mask.kind(), mask.shape());
        let strides = if placement.own_strides { mask.strides() } else { dense(shape) };
        let mut bytes = vec![0xFF; reach(shape, strides).unwrap_or(0) * kind.bytes()];
        for (row, key) in rows(shape).flat_map(|row| (0..shape[3]).map(move |key| (row, key))) {
            let bias = mask.bias([row[0], row[1], row[2], key]);
            let at = (start(row, strides) + key * strides[3]) * kind.bytes();
            match kind {
                MaskKind::Bool => bytes[at] = u8::from(bias == 0.0),
                MaskKind::Additive(Dtype::F32) => bytes[at..at + 4].copy_from_slice(&bias.to_ne_bytes()),
                MaskKind::Additive(Dtype::F16) => {
                    bytes[at..at + 2].copy_from_slice(&f16::from_f32(bias).to_ne_bytes());
                }
                MaskKind::Additive(Dtype::BF16) => {
                    bytes[at..at + 2].copy_from_slice(&bf16::from_f32(bias).to_ne_bytes());
                }
            }
        }
        Ok(Self { memory: filled(device, ScalarType::U8, &bytes)?, kind, shape, strides })
    }
}

impl<M: DeviceMemory> Mask<M> {
    pub(crate) fn view(&self) -> GpuMask<'_, M> {
        let Self { memory, kind, shape, strides } = self;
        GpuMask { bytes: memory.view(), kind: *kind, shape: *shape, strides: *strides }
    }
}

impl<M: DeviceMemory> Uploaded<M> {
    /// Copies of tensors, without block tables. The tensors have been read when this returns.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn new<D: HostAccess<Memory = M>>(device: &D, inputs: &Inputs<'_>) -> Result<Self, D::Error> {
        Self::placed(device, inputs, Placement::default())
    }

    /// [`Uploaded::new`] with copies that lie as the caller says.
    ///
    /// # Errors
    /// The errors of [`Uploaded::new`].
    pub fn placed<D: HostAccess<Memory = M>>(
        device: &D,
        inputs: &Inputs<'_>,
        placement: Placement,
    ) -> Result<Self, D::Error> {
        let list = |of: Option<&[f32]>| of.map(|of| list(device, of)).transpose();
        let mask = |of: &Option<MaskView<'_>>| {
            of.as_ref().map(|mask| Mask::new(device, mask, placement)).transpose()
        };
        let (q, copied) = (&inputs.q, placement.strides(inputs.q.shape(), inputs.q.strides()));
        let memory = filled(device, scalar_type(q.dtype()), &bytes_of(q, copied))?;
        Ok(Self {
            q: Elements { memory, shape: q.shape(), strides: copied.0 },
            k: Kv::new(device, &inputs.k, placement)?,
            v: Kv::new(device, &inputs.v, placement)?,
            tables: None,
            kept: {
                let KeptInputs { first, last } = inputs.kept.unwrap_or_default();
                [Kept::new(device, first, placement)?, Kept::new(device, last, placement)?]
            },
            tree: mask(&inputs.tree)?,
            mask: mask(&inputs.mask)?,
            alibi_slopes: list(inputs.alibi_slopes)?,
            sinks: list(inputs.sinks)?,
        })
    }

    /// Copies block tables too, which are of the pages of these keys; over those before where they have the same size.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn upload_tables<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        tables: &BlockTables,
    ) -> Result<(), D::Error> {
        self.tables = Some(Tables::new(device, tables, self.tables.take())?);
        Ok(())
    }

    /// [`Uploaded::upload_tables`] of the first and of the last tokens that are kept in 16 bits.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn upload_kept_tables<D: HostAccess<Memory = M>>(
        &mut self,
        device: &D,
        kept: &KeptInputs<'_>,
    ) -> Result<(), D::Error> {
        for (of, pages) in self.kept.iter_mut().zip([kept.first, kept.last]) {
            if let (Some(of), Some(pages)) = (of, pages) {
                of.tables = Some(Tables::new(device, pages.tables, of.tables.take())?);
            }
        }
        Ok(())
    }

    /// The copies, for a run.
    #[must_use]
    pub fn inputs(&self) -> GpuInputs<'_, M> {
        let Elements { memory, shape, strides } = &self.q;
        GpuInputs {
            q: GpuTensor { view: memory.view(), shape: *shape, strides: *strides },
            k: self.k.view(),
            v: self.v.view(),
            tables: self.tables.as_ref().map(Tables::view),
            kept: {
                let [first, last] = self.kept.each_ref().map(|kept| {
                    kept.as_ref().map(|Kept { k, v, tables }| GpuKeptPages {
                        k: k.view(),
                        v: v.view(),
                        tables: tables.as_ref().map(Tables::view),
                    })
                });
                GpuKeptInputs { first, last }
            },
            tree: self.tree.as_ref().map(Mask::view),
            mask: self.mask.as_ref().map(Mask::view),
            alibi_slopes: self.alibi_slopes.as_ref().map(M::view),
            sinks: self.sinks.as_ref().map(M::view),
        }
    }

    /// The memory of keys and of values: u8, laid out as [`Uploaded::inputs`] says.
    pub const fn kv_mut(&mut self) -> [&mut M; 2] {
        [&mut self.k.memory, &mut self.v.memory]
    }
}

/// Outputs of a run, in device memory that they own.
#[derive(Debug)]
pub struct Results<M> {
    out: Elements<M>,
    dtype: Dtype,
    lse: Option<M>,
}

impl<M: DeviceMemory> Results<M> {
    /// Memory for the results that a run writes to these outputs.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn new<D: HostAccess<Memory = M>>(device: &D, outputs: &Outputs<'_>) -> Result<Self, D::Error> {
        Self::placed(device, outputs, Placement::default())
    }

    /// [`Results::new`] with an `out` that lies as the caller says; bytes of gaps are not written here.
    ///
    /// # Errors
    /// The errors of [`Results::new`].
    pub fn placed<D: HostAccess<Memory = M>>(
        device: &D,
        outputs: &Outputs<'_>,
        placement: Placement,
    ) -> Result<Self, D::Error> {
        let (dtype, shape) = (outputs.out.dtype(), outputs.out.shape());
        let (strides, len) = placement.strides(shape, outputs.out.strides());
        let lse = outputs.lse.as_ref().map(|lse| device.uninit(ScalarType::F32, lse.len()));
        Ok(Self {
            out: Elements { memory: device.uninit(scalar_type(dtype), len)?, shape, strides },
            dtype,
            lse: lse.transpose()?,
        })
    }

    /// The outputs, for a run.
    pub fn outputs(&mut self) -> GpuOutputs<'_, M> {
        let Elements { memory, shape, strides } = &mut self.out;
        GpuOutputs {
            out: GpuTensorMut { view: memory.view_mut(), shape: *shape, strides: *strides },
            lse: self.lse.as_mut().map(M::view_mut),
        }
    }

    /// The memory of out, and of the logsumexps where they are wanted.
    #[must_use]
    pub const fn memories(&self) -> (&M, Option<&M>) {
        (&self.out.memory, self.lse.as_ref())
    }

    /// The bytes of `out`'s memory that are of no element, where it lies with gaps.
    #[must_use]
    pub fn gaps(&self) -> Vec<usize> {
        let (Elements { memory, shape, strides }, size) = (&self.out, self.dtype.bytes());
        let mut is_gap = vec![true; memory.view().len() * size];
        for row in rows(*shape) {
            is_gap[start(row, *strides) * size..][..shape[3] * size].fill(false);
        }
        is_gap.iter().enumerate().filter_map(|(at, gap)| gap.then_some(at)).collect()
    }

    /// Copies the results to outputs of the same dtype, shape and lists, of any strides, after the work has ended.
    ///
    /// # Errors
    /// The error that the device reports, also for earlier work that failed.
    ///
    /// # Panics
    /// If dtype or shape differ from the outputs of [`Results::new`].
    pub fn download<D: HostAccess<Memory = M>>(
        &self,
        device: &D,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), D::Error> {
        let (Elements { memory, shape, strides }, size) = (&self.out, self.dtype.bytes());
        let out: &mut TensorViewMut<'_> = &mut outputs.out;
        assert_eq!((self.dtype, *shape), (out.dtype(), out.shape()), "dtype and shape of out");
        let mut bytes = vec![0u8; memory.view().len() * size];
        device.read(memory, 0, &mut bytes)?;
        for row in rows(*shape) {
            let to = out.row_bytes_mut(row);
            to.copy_from_slice(&bytes[start(row, *strides) * size..][..to.len()]);
        }
        if let (Some(memory), Some(lse)) = (&self.lse, &mut outputs.lse) {
            read_list(device, memory, lse)?;
        }
        Ok(())
    }
}
