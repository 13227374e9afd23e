//! Memory of candle tensors, as views.

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp3, DType, DeviceLocation, Error, Layout, MetalStorage,
    Result, Shape, Tensor, WithDType, bail,
};
use flashtile::{CacheError, Dtype, Element, MaskView, RunError, TensorView, TensorViewMut};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use std::any::Any;
use std::cell::Cell;

/// Order of the axes of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum TensorLayout {
    /// `(batch, heads, seq, dim)`, as in `candle_nn::ops::sdpa`.
    #[default]
    Bhsd,
    /// `(batch, seq, heads, dim)`, as in `candle_flash_attn`.
    Bshd,
}

/// Order of the axes in a call, where sequences may also be packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Axes {
    Bhsd,
    Bshd,
    /// `(total, heads, dim)`.
    Packed,
}

impl From<TensorLayout> for Axes {
    fn from(layout: TensorLayout) -> Self {
        match layout {
            TensorLayout::Bhsd => Self::Bhsd,
            TensorLayout::Bshd => Self::Bshd,
        }
    }
}

impl Axes {
    const fn names(self) -> &'static str {
        match self {
            Self::Bhsd => "(batch, heads, seq, dim)",
            Self::Bshd => "(batch, seq, heads, dim)",
            Self::Packed => "(total, heads, dim)",
        }
    }

    /// Sizes in the order of these axes.
    fn own(self, [b, h, s, d]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Bhsd => vec![b, h, s, d],
            Self::Bshd => vec![b, s, h, d],
            Self::Packed => vec![s, h, d],
        }
    }

    /// Sizes or strides of a tensor in the order `[batch, heads, rows, dim]`. `batch` stands for a missing axis.
    pub(crate) fn logical(self, of: &[usize], batch: usize) -> Option<[usize; 4]> {
        match (self, of) {
            (Self::Bhsd, &[b, h, s, d]) | (Self::Bshd, &[b, s, h, d]) => Some([b, h, s, d]),
            (Self::Packed, &[s, h, d]) => Some([batch, h, s, d]),
            (Self::Bhsd | Self::Bshd | Self::Packed, _) => None,
        }
    }

    /// Shape of the logsumexp of a result `[batch, heads, rows, dim]`.
    pub(crate) fn lse_dims(self, [batch, heads, rows, _]: [usize; 4]) -> Vec<usize> {
        match self {
            Self::Bhsd | Self::Bshd => vec![batch, heads, rows],
            Self::Packed => vec![heads, rows],
        }
    }

    /// Shape of a dense tensor in memory order, and its strides in the order `[batch, heads, rows, dim]`.
    pub(crate) fn dense(self, [b, h, s, d]: [usize; 4]) -> (Shape, [usize; 4]) {
        match self {
            Self::Bhsd => (Shape::from((b, h, s, d)), [h * s * d, s * d, d, 1]),
            Self::Bshd => (Shape::from((b, s, h, d)), [h * s * d, d, h * d, 1]),
            Self::Packed => (Shape::from((s, h, d)), [h * s * d, d, h * d, 1]),
        }
    }
}

/// Converts an error of flashtile to one of candle.
pub(crate) fn refused(error: impl Into<flashtile::Error>) -> Error {
    Error::wrap(error.into())
}

/// The error for a tensor on a device that is not supported.
pub(crate) fn unsupported_device(name: &str, location: DeviceLocation) -> Error {
    let why = if cfg!(any(feature = "cuda", feature = "metal")) {
        "where flashtile-candle does not compute this"
    } else {
        "flashtile-candle computes on the CPU"
    };
    Error::msg(format!("{name} is on {location:?}, {why}: move it with to_device"))
}

pub(crate) fn check_device(name: &str, tensor: &Tensor) -> Result<()> {
    match tensor.device().location() {
        DeviceLocation::Cpu => Ok(()),
        location => Err(unsupported_device(name, location)),
    }
}

/// Refuses a tensor whose elements cannot be read by the host.
pub(crate) fn check_readable(name: &str, tensor: &Tensor) -> Result<()> {
    let device = tensor.device();
    let on_device =
        cfg!(feature = "cuda") && device.is_cuda() || cfg!(feature = "metal") && device.is_metal();
    if on_device { Ok(()) } else { check_device(name, tensor) }
}

/// Shape and strides of a tensor in the order `[batch, heads, rows, dim]`. Elements of `dim` must be contiguous.
pub(crate) fn logical(name: &str, layout: &Layout, axes: Axes) -> Result<([usize; 4], [usize; 4])> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let (Some(shape), Some(of)) = (axes.logical(dims, 1), axes.logical(strides, 0)) else {
        bail!("{name} has shape {dims:?}, expected {}", axes.names())
    };
    if shape[3] > 1 && of[3] != 1 {
        bail!("{name} has strides {strides:?}, expected 1 for the last axis: call contiguous() on it")
    }
    Ok((shape, of))
}

/// Shape and strides of a mask in the order `[batch, heads, queries, keys]`.
pub(crate) fn logical_mask(layout: &Layout) -> Result<([usize; 4], [usize; 4])> {
    let four = |of: &[usize], missing| match *of {
        [q, k] => Some([missing, missing, q, k]),
        [b, h, q, k] => Some([b, h, q, k]),
        _ => None,
    };
    let (dims, strides) = (layout.dims(), layout.stride());
    let (Some(shape), Some(of)) = (four(dims, 1), four(strides, 0)) else {
        bail!("mask has shape {dims:?}, expected (queries, keys) or (batch, heads, queries, keys)")
    };
    if shape[3] > 1 && of[3] > 1 {
        bail!("mask has strides {strides:?}, expected 0 or 1 for the last axis: call contiguous() on it")
    }
    Ok((shape, of))
}

/// Checks that every element of a layout with elements lies in memory of `len` elements.
#[cfg(any(feature = "cuda", feature = "metal"))]
pub(crate) fn check_inside(name: &str, layout: &Layout, len: usize) -> Result<()> {
    let mut axes = layout.dims().iter().zip(layout.stride());
    let last = axes.try_fold(layout.start_offset(), |last, (&n, &stride)| {
        last.checked_add((n - 1).checked_mul(stride)?)
    });
    if last.is_none_or(|last| last >= len) {
        bail!("{name} lies outside its memory")
    }
    Ok(())
}

/// Memory and layout of a tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stored<'a, S = CpuStorage> {
    pub(crate) name: &'static str,
    pub(crate) storage: &'a S,
    pub(crate) layout: &'a Layout,
}

impl<S: BackendStorage> Stored<'_, S> {
    /// The error for a tensor of another dtype.
    pub(crate) fn unexpected(&self, expected: &str) -> Error {
        Error::msg(format!("{} is {:?}, expected {expected}", self.name, self.storage.dtype()))
    }
}

impl<'a> Stored<'a> {
    fn elements<T: WithDType>(&self) -> Result<&'a [T]> {
        if self.layout.shape().elem_count() == 0 {
            // The offset of an empty tensor may lie past the end.
            return Ok(&[]);
        }
        let all = self.storage.as_slice::<T>()?;
        all.get(self.layout.start_offset()..)
            .ok_or_else(|| Error::msg(format!("{} lies outside its memory", self.name)))
    }

    /// The tensor as a view, without a copy. Any strides are accepted, but elements of `dim` must be contiguous.
    pub(crate) fn view(&self, axes: Axes) -> Result<TensorView<'a>> {
        let (shape, strides) = logical(self.name, self.layout, axes)?;
        let view = match self.storage {
            CpuStorage::F32(_) => TensorView::strided(self.elements::<f32>()?, shape, strides),
            CpuStorage::F16(_) => TensorView::strided(self.elements::<f16>()?, shape, strides),
            CpuStorage::BF16(_) => TensorView::strided(self.elements::<bf16>()?, shape, strides),
            _ => return Err(self.unexpected("F32, F16 or BF16")),
        };
        view.map_err(|error| Error::msg(format!("{}: {error}", self.name)))
    }

    /// The tensor as a mask: its elements are added to scores or, if `visible`, are bytes that say which keys are visible.
    pub(crate) fn mask(&self, visible: bool) -> Result<MaskView<'a>> {
        let (shape, strides) = logical_mask(self.layout)?;
        let mask = match (self.storage, visible) {
            (CpuStorage::U8(_), true) => MaskView::bool_bytes(self.elements::<u8>()?, shape, strides),
            (CpuStorage::F32(_), false) => {
                MaskView::additive_strided(self.elements::<f32>()?, shape, strides)
            }
            (CpuStorage::F16(_), false) => {
                MaskView::additive_strided(self.elements::<f16>()?, shape, strides)
            }
            (CpuStorage::BF16(_), false) => {
                MaskView::additive_strided(self.elements::<bf16>()?, shape, strides)
            }
            (_, true) => return Err(self.unexpected("U8, where 1 is visible")),
            (_, false) => return Err(self.unexpected("F32, F16 or BF16, which is added to scores")),
        };
        mask.map_err(|error| Error::msg(format!("mask: {error}")))
    }
}

/// A new dense tensor that `write` fills: `shape` is `[batch, heads, rows, dim]`.
pub(crate) fn write_new(
    dtype: Dtype,
    shape: [usize; 4],
    axes: Axes,
    write: impl FnOnce(TensorViewMut<'_>) -> Result<()>,
) -> Result<(CpuStorage, Shape)> {
    let (dims, strides) = axes.dense(shape);
    let len = dims.elem_count();
    // `vec!` takes zeroed memory of integers from the system as it is, but writes zeros to memory of half-precision types.
    let storage = match dtype {
        Dtype::F32 => fill(zeros(0f32, len)?, shape, strides, write),
        Dtype::F16 => fill(zeros(0u16, len)?.reinterpret_into::<f16>(), shape, strides, write),
        Dtype::BF16 => fill(zeros(0u16, len)?.reinterpret_into::<bf16>(), shape, strides, write),
    };
    Ok((storage?, dims))
}

/// A list of zeros, or an error if there is no memory: `vec!` alone would end the process.
pub(crate) fn zeros<T: Clone>(zero: T, len: usize) -> Result<Vec<T>> {
    let mut room: Vec<T> = Vec::new();
    if room.try_reserve_exact(len).is_err() {
        return Err(refused(flashtile::Error::Memory { bytes: len.saturating_mul(size_of::<T>()) }));
    }
    // `vec!` takes zeroed pages from the system, but zeros would be written to a reserved list. The compiler may not drop the reservation.
    drop(std::hint::black_box(room));
    Ok(vec![zero; len])
}

fn fill<T: Element + WithDType>(
    mut all: Vec<T>,
    shape: [usize; 4],
    strides: [usize; 4],
    write: impl FnOnce(TensorViewMut<'_>) -> Result<()>,
) -> Result<CpuStorage> {
    write(TensorViewMut::strided(&mut all, shape, strides).map_err(refused)?)?;
    Ok(T::to_cpu_storage_owned(all))
}

/// Converts an error of flashtile to one of candle, with shapes in the axis order of the caller's tensors.
pub(crate) fn refused_shape(error: impl Into<flashtile::Error>, axes: CallAxes) -> Error {
    let error = error.into();
    let (tensor, expected, got) = match error {
        flashtile::Error::Run(RunError::Shape { tensor, expected, got })
        | flashtile::Error::Cache(CacheError::Shape { tensor, expected, got }) => (tensor, expected, got),
        _ => return Error::wrap(error),
    };
    let of = if tensor == "k" || tensor == "v" { axes.kv } else { axes.q };
    Error::msg(format!("{tensor} has shape {:?}, expected {:?}", of.own(got), of.own(expected)))
}

/// Axes of the tensors of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallAxes {
    /// Order of the axes of q and out.
    pub(crate) q: Axes,
    /// Order of the axes of k and v.
    pub(crate) kv: Axes,
}

/// Refuses a tensor whose gradient would be lost silently.
pub(crate) fn check_no_gradient(name: &str, tensor: &Tensor) -> Result<()> {
    if tensor.track_op() {
        bail!("{name} is a variable or computed from one, and has no gradient here: call detach() on it")
    }
    Ok(())
}

/// Shape of the logsumexp.
pub(crate) fn lse_dims(axes: Axes, q: &Tensor) -> Result<Vec<usize>> {
    let Some(shape) = axes.logical(q.dims(), 1) else { bail!("q has shape {:?}", q.dims()) };
    Ok(axes.lse_dims(shape))
}

/// Query, keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Qkv<T> {
    pub(crate) q: T,
    pub(crate) k: T,
    pub(crate) v: T,
}

impl<T> Qkv<T> {
    /// Applies a function to each of the three, with its name.
    pub(crate) fn each<U>(self, f: impl Fn(&'static str, T) -> Result<U>) -> Result<Qkv<U>> {
        Ok(Qkv { q: f("q", self.q)?, k: f("k", self.k)?, v: f("v", self.v)? })
    }
}

impl<'a, S> Qkv<(&'a S, &'a Layout)> {
    /// The tensors with their names, as candle passes them to an operator.
    pub(crate) fn stored(self) -> Qkv<Stored<'a, S>> {
        let stored = |name, (storage, layout)| Stored { name, storage, layout };
        Qkv { q: stored("q", self.q), k: stored("k", self.k), v: stored("v", self.v) }
    }
}

/// A function of three tensors as an operator of candle. While it runs, the tensors are locked for reading, even if they share memory.
pub(crate) struct Op<F> {
    pub(crate) name: &'static str,
    pub(crate) run: F,
}

impl<F: Fn(Qkv<Stored<'_>>) -> Result<(CpuStorage, Shape)>> CustomOp3 for Op<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        (self.run)(Qkv { q: (s1, l1), k: (s2, l2), v: (s3, l3) }.stored())
    }
}

/// A function that runs once, with the storage and the layout of a tensor.
struct Read<F> {
    name: &'static str,
    run: Cell<Option<F>>,
}

impl<F: FnOnce(&dyn Any, &Layout)> Read<F> {
    fn call<T>(&self, storage: &dyn Any, layout: &Layout) -> Result<T> {
        if let Some(run) = self.run.take() {
            run(storage, layout);
        }
        // An operator must return a tensor. This one has none; the error saves the device memory of an empty one.
        Err(Error::Msg(String::new()))
    }
}

impl<F: FnOnce(&dyn Any, &Layout)> CustomOp1 for Read<F> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        self.call(storage, layout)
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.call(storage, layout)
    }

    fn metal_fwd(&self, storage: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        self.call(storage, layout)
    }
}

/// Calls a function with the memory of a tensor, which is locked for reading. Unlike `Tensor::storage_and_layout`, this cannot deadlock
/// if another tensor of the same memory is locked already.
pub(crate) fn read<S: 'static, T>(
    name: &'static str,
    tensor: &Tensor,
    run: impl FnOnce(Stored<'_, S>) -> Result<T>,
) -> Result<T> {
    let mut result = None;
    let keep = |storage: &dyn Any, layout: &Layout| {
        result = Some(match storage.downcast_ref() {
            Some(storage) => run(Stored { name, storage, layout }),
            None => Err(unsupported_device(name, tensor.device().location())),
        });
    };
    let ended = tensor.apply_op1_no_bwd(&Read { name, run: Cell::new(Some(keep)) });
    result.unwrap_or_else(|| match ended {
        Err(error) => Err(error),
        Ok(_) => Err(Error::msg(format!("{name} was not read"))),
    })
}

/// [`read`] of query, keys and values.
pub(crate) fn read_qkv<S: 'static, T>(
    tensors: Qkv<&Tensor>,
    run: impl FnOnce(Qkv<Stored<'_, S>>) -> Result<T>,
) -> Result<T> {
    let Qkv { q, k, v } = tensors;
    read("q", q, |q| read("k", k, |k| read("v", v, |v| run(Qkv { q, k, v }))))
}

/// A list of f32, such as ALiBi slopes.
pub(crate) fn list_f32(name: &'static str, tensor: &Tensor, axes: usize) -> Result<Vec<f32>> {
    check_device(name, tensor)?;
    check_no_gradient(name, tensor)?;
    match (tensor.dtype(), tensor.rank()) {
        (DType::F32, rank) if rank > 0 && rank <= axes => tensor.flatten_all()?.to_vec1::<f32>(),
        (dtype, _) => {
            bail!("{name} is {dtype:?} of shape {:?}, expected F32 of {}", tensor.dims(), counted(axes))
        }
    }
}

/// Up to this many axes, in words.
pub(crate) const fn counted(axes: usize) -> &'static str {
    if axes > 1 { "one axis or two" } else { "one axis" }
}

/// A list of lengths, in any type of integers.
pub(crate) fn list_usize(name: &'static str, tensor: &Tensor) -> Result<Vec<usize>> {
    check_readable(name, tensor)?;
    if tensor.rank() != 1 {
        bail!("{name} has shape {:?}, expected one axis", tensor.dims())
    }
    let index =
        |x: i64| usize::try_from(x).map_err(|_| Error::msg(format!("{name} has {x}, expected 0 or more")));
    match tensor.dtype() {
        DType::U32 => Ok(tensor.to_vec1::<u32>()?.into_iter().map(|x| x as usize).collect()),
        DType::I32 => tensor.to_vec1::<i32>()?.into_iter().map(|x| index(x.into())).collect(),
        DType::I64 => tensor.to_vec1::<i64>()?.into_iter().map(index).collect(),
        dtype => bail!("{name} is {dtype:?}, expected U32, I32 or I64"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_without_memory_is_refused() {
        assert_eq!(zeros(0u16, 3).unwrap(), [0; 3]);
        let error = zeros(0u16, usize::MAX / 8).unwrap_err().to_string();
        assert!(error.contains(&format!("{}", usize::MAX / 8 * 2)), "{error}");
    }

    #[cfg(not(any(feature = "cuda", feature = "metal")))]
    #[test]
    fn another_device_is_named() {
        let error = unsupported_device("alibi_slopes", DeviceLocation::Cuda { gpu_id: 3 }).to_string();
        // A backtrace follows if the environment asks for one.
        assert_eq!(
            error.lines().next().unwrap(),
            "alibi_slopes is on Cuda { gpu_id: 3 }, flashtile-candle computes on the CPU: move it with to_device"
        );
    }
}
