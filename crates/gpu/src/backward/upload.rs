//! Tensors of a backward run of the host, copied to the memory of a device and back.

use super::tensors::{GpuBackwardInputs, GpuGradients};
use crate::array::GpuArray;
use crate::error::SessionError;
use crate::upload::{Mask, Placement, list, read_list};
use flashtile_core::codec::KvView;
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::tensor::{MaskView, TensorView};
use flashtile_kernel::{DeviceMemory, HostAccess, ScalarType};

/// Copies of the inputs of a backward run, in device memory that they own.
#[derive(Debug)]
pub struct UploadedBackward<M> {
    q: GpuArray<M>,
    k: GpuArray<M>,
    v: GpuArray<M>,
    out: GpuArray<M>,
    lse: M,
    d_out: GpuArray<M>,
    d_lse: Option<M>,
    tree: Option<Mask<M>>,
    mask: Option<Mask<M>>,
    alibi_slopes: Option<M>,
    sinks: Option<M>,
}

impl<M: DeviceMemory> UploadedBackward<M> {
    /// Copies of tensors that were [checked](flashtile_core::gradients::check). They have been read when this returns.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn new<D: HostAccess<Memory = M>>(
        device: &D,
        inputs: &BackwardInputs<'_>,
    ) -> Result<Self, SessionError<D::Error>> {
        let BackwardInputs { forward, out, lse, d_out, d_lse } = inputs;
        let array = |tensor: &TensorView<'_>| GpuArray::upload(device, tensor);
        let kv = |kv: &KvView<'_>| match kv {
            KvView::Elements(tensor) => array(tensor),
            KvView::Codes(_) => unreachable!("problems over codes have no gradients"),
        };
        let lists = |values: Option<&[f32]>| {
            values.map(|values| list(device, values)).transpose().map_err(SessionError::device)
        };
        let mask = |mask: &Option<MaskView<'_>>| {
            let new = |mask| Mask::new(device, mask, Placement::default());
            mask.as_ref().map(new).transpose().map_err(SessionError::device)
        };
        Ok(Self {
            q: array(&forward.q)?,
            k: kv(&forward.k)?,
            v: kv(&forward.v)?,
            out: array(out)?,
            lse: list(device, lse).map_err(SessionError::device)?,
            d_out: array(d_out)?,
            d_lse: lists(*d_lse)?,
            tree: mask(&forward.tree)?,
            mask: mask(&forward.mask)?,
            alibi_slopes: lists(forward.alibi_slopes)?,
            sinks: lists(forward.sinks)?,
        })
    }

    /// The copies, for a run.
    #[must_use]
    pub fn inputs(&self) -> GpuBackwardInputs<'_, M> {
        GpuBackwardInputs {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            out: self.out.view(),
            lse: self.lse.view(),
            d_out: self.d_out.view(),
            d_lse: self.d_lse.as_ref().map(M::view),
            tree: self.tree.as_ref().map(Mask::view),
            mask: self.mask.as_ref().map(Mask::view),
            alibi_slopes: self.alibi_slopes.as_ref().map(M::view),
            sinks: self.sinks.as_ref().map(M::view),
        }
    }
}

/// Gradients in device memory that they own.
#[derive(Debug)]
pub struct BackwardResults<M> {
    d_q: GpuArray<M>,
    d_k: GpuArray<M>,
    d_v: GpuArray<M>,
    d_sinks: Option<M>,
    d_bias: Option<M>,
    d_alibi_slopes: Option<M>,
}

impl<M: DeviceMemory> BackwardResults<M> {
    /// Memory for the gradients that a run writes.
    ///
    /// # Errors
    /// The error that the device reports.
    pub fn new<D: HostAccess<Memory = M>>(
        device: &D,
        gradients: &Gradients<'_>,
    ) -> Result<Self, SessionError<D::Error>> {
        let Gradients { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes, .. } = gradients;
        let list = |list: &Option<&mut [f32]>| {
            let new = |list: &&mut [f32]| device.uninit(ScalarType::F32, list.len().max(1));
            list.as_ref().map(new).transpose().map_err(SessionError::device)
        };
        Ok(Self {
            d_q: GpuArray::uninit(device, d_q.dtype(), d_q.shape())?,
            d_k: GpuArray::uninit(device, d_k.dtype(), d_k.shape())?,
            d_v: GpuArray::uninit(device, d_v.dtype(), d_v.shape())?,
            d_sinks: list(d_sinks)?,
            d_bias: list(d_bias)?,
            d_alibi_slopes: list(d_alibi_slopes)?,
        })
    }

    /// The gradients, for a run.
    pub fn gradients(&mut self) -> GpuGradients<'_, M> {
        GpuGradients {
            d_q: self.d_q.view_mut(),
            d_k: self.d_k.view_mut(),
            d_v: self.d_v.view_mut(),
            d_sinks: self.d_sinks.as_mut().map(M::view_mut),
            d_bias: self.d_bias.as_mut().map(M::view_mut),
            d_alibi_slopes: self.d_alibi_slopes.as_mut().map(M::view_mut),
        }
    }

    /// Copies the gradients to tensors of the dtypes, shapes and lists of [`BackwardResults::new`], after the work has ended.
    ///
    /// # Errors
    /// The error that the device reports, also for earlier work that failed.
    pub fn download<D: HostAccess<Memory = M>>(
        &self,
        device: &D,
        gradients: &mut Gradients<'_>,
    ) -> Result<(), SessionError<D::Error>> {
        self.d_q.download(device, &mut gradients.d_q)?;
        self.d_k.download(device, &mut gradients.d_k)?;
        self.d_v.download(device, &mut gradients.d_v)?;
        let lists = [
            (&self.d_sinks, &mut gradients.d_sinks),
            (&self.d_bias, &mut gradients.d_bias),
            (&self.d_alibi_slopes, &mut gradients.d_alibi_slopes),
        ];
        for (memory, list) in lists {
            if let (Some(memory), Some(list)) = (memory, list) {
                read_list(device, memory, list).map_err(SessionError::device)?;
            }
        }
        Ok(())
    }
}
