//! Shared by the backends of GPUs: sessions over host tensors, steps over caches of a device, and errors.

use crate::attention::Attention;
use crate::backend::HostSession;
use crate::error::{Error, Result};
use crate::step::{StepLayer, StepRunner, StepStore};
use flashtile_core::cache::HostStore;
use flashtile_core::dtype::Dtype;
use flashtile_core::gradients::{BackwardInputs, Gradients};
use flashtile_core::inputs::{Inputs, Outputs, RunError};
use flashtile_core::problem::ProblemDesc;
use flashtile_gpu::SessionError;
use flashtile_gpu::cache::{GpuStore, StoreError};
use flashtile_gpu::engine::Engine;
use flashtile_gpu::session::{HostTables, Session};
use flashtile_gpu::tensors::{
    GpuInputs, GpuKeptInputs, GpuKeptPages, GpuMask, GpuOutputs, GpuTensor, GpuTensorMut, dtype_of,
};
use flashtile_kernel::{HostAccess, Span, View, ViewMut};
use std::error::Error as StdError;
use std::fmt;
use std::ops::Range;
use std::time::Instant;

/// Launches whose host time is measured.
const LAUNCHES: usize = 100;

/// Seconds of the host for one launch, of many.
#[cfg_attr(
    not(any(feature = "cuda", feature = "metal")),
    allow(dead_code, reason = "the simulator runs at once")
)]
pub(super) fn host_seconds(mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    (0..LAUNCHES).try_for_each(|_| launch())?;
    Ok(started.elapsed().as_secs_f64() / LAUNCHES as f64)
}

impl<E> HostSession for Session<E>
where
    E: Engine + fmt::Debug,
    E::Device: fmt::Debug,
    Session<E>: Send,
    Error: From<E::Error>,
{
    fn compute(&mut self, desc: &ProblemDesc, inputs: &Inputs<'_>, outputs: &mut Outputs<'_>) -> Result<()> {
        Ok(self.compute(desc, inputs, outputs)?)
    }

    fn backward(
        &mut self,
        desc: &ProblemDesc,
        inputs: &BackwardInputs<'_>,
        gradients: &mut Gradients<'_>,
    ) -> Result<()> {
        Ok(self.compute_backward(desc, inputs, gradients)?)
    }
}

impl<E: StdError + Send + Sync + 'static> From<SessionError<E>> for Error {
    fn from(error: SessionError<E>) -> Self {
        match error {
            SessionError::Problem(error) => Self::Problem(error),
            SessionError::Unsupported(error) => Self::Unsupported(error),
            SessionError::Inputs(error) => Self::Run(error),
            SessionError::View(error) => error.into(),
            error => Self::device(error),
        }
    }
}

impl<E: StdError + Send + Sync + 'static> From<StoreError<E>> for Error {
    fn from(error: StoreError<E>) -> Self {
        match error.into_session() {
            Ok(error) => error.into(),
            Err(error) => Self::Cache(error),
        }
    }
}

/// [`Attention`] whose tensors lie in the memory of a device: the options of a layer in a [`Step`](crate::Step) over a cache there.
#[derive(Debug)]
#[non_exhaustive]
pub struct GpuAttention<'a, M> {
    /// Visibility, offset, scale and softcap. Its mask, slopes, sinks and sequences must be unset.
    pub options: Attention<'a>,
    /// A boolean mask (`true` is visible) or an additive one, broadcastable to `[sequences, q_heads, longest q_len, longest kv_len]`.
    pub mask: Option<GpuMask<'a, M>>,
    /// ALiBi slopes `[q_heads]` or `[sequences, q_heads]`, f32.
    pub alibi_slopes: Option<View<'a, M>>,
    /// Logits `[q_heads]` that join the denominator of the softmax, f32.
    pub sinks: Option<View<'a, M>>,
}

impl<M> Clone for GpuAttention<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for GpuAttention<'_, M> {}

impl<'a, M> From<Attention<'a>> for GpuAttention<'a, M> {
    fn from(options: Attention<'a>) -> Self {
        Self { options, mask: None, alibi_slopes: None, sinks: None }
    }
}

/// The elements from one on.
fn rows_of(Span { element, offset, len }: Span, first: usize) -> Span {
    let first = first.min(len);
    Span { element, offset: offset + first, len: len - first }
}

impl<D> StepStore for GpuStore<D>
where
    D: HostAccess<Memory: 'static> + Clone,
    D::Error: StdError + Send + Sync + 'static,
{
    type Options<'a> = GpuAttention<'a, D::Memory>;
    type Outputs<'a> = GpuOutputs<'a, D::Memory>;

    const READS_PREFIXES_ONCE: bool = false;

    fn query(q: &GpuTensor<'_, D::Memory>) -> Result<(usize, Dtype)> {
        let element = q.view.element();
        let expected = "f32, f16 or bf16";
        let refused = || SessionError::<D::Error>::Element { tensor: "q", expected, element };
        Ok((q.shape[1], dtype_of(element).ok_or_else(refused)?))
    }

    fn check_options(options: &GpuAttention<'_, D::Memory>) -> Result<()> {
        let Attention { mask, alibi_slopes, sinks, .. } = options.options;
        let of_host =
            [("mask", mask.is_some()), ("alibi_slopes", alibi_slopes.is_some()), ("sinks", sinks.is_some())];
        match of_host.into_iter().find(|(_, is_some)| *is_some) {
            Some((tensor, _)) => Err(RunError::HostMemory { tensor }.into()),
            None => HostStore::check_options(&options.options),
        }
    }

    fn set(options: &GpuAttention<'_, D::Memory>, desc: &mut ProblemDesc) {
        options.options.set(desc);
        desc.mask = options.mask.map(|mask| mask.kind);
        desc.alibi = options.alibi_slopes.is_some();
        desc.sinks = options.sinks.is_some();
    }

    fn outputs<'a>(out: &'a mut GpuTensorMut<'_, D::Memory>) -> GpuOutputs<'a, D::Memory> {
        let GpuTensorMut { view, shape, strides } = out;
        GpuOutputs::new(GpuTensorMut { view: view.reborrow(), shape: *shape, strides: *strides })
    }

    fn rows<'a>(of: &Self::Rows<'a>, rows: Range<usize>) -> Result<Self::Rows<'a>> {
        let [batch, heads, _, dim] = of.shape;
        let span = rows_of(of.view.span(), rows.start * of.strides[2]);
        let shape = [batch, heads, rows.len(), dim];
        Ok(GpuTensor { view: View::new(of.view.memory(), span), shape, strides: of.strides })
    }

    fn rows_of_outputs<'a>(of: &'a mut Self::Outputs<'_>, rows: Range<usize>) -> Result<Self::Outputs<'a>> {
        let GpuTensorMut { view, shape: [batch, heads, _, dim], strides } = &mut of.out;
        let span = rows_of(view.span(), rows.start * strides[2]);
        let shape = [*batch, *heads, rows.len(), *dim];
        Ok(GpuOutputs::new(GpuTensorMut {
            view: ViewMut::new(view.memory_mut(), span),
            shape,
            strides: *strides,
        }))
    }

    fn out_shape(of: &Self::Outputs<'_>) -> [usize; 4] {
        of.out.shape
    }

    fn not_in_windows(options: &Self::Options<'_>, outputs: &Self::Outputs<'_>) -> Option<&'static str> {
        let heads = outputs.out.shape[1];
        let each = options.alibi_slopes.is_some_and(|slopes| slopes.len() > heads);
        let refused = [
            (options.mask.is_some(), "a mask"),
            (each, "alibi_slopes of each sequence"),
            (outputs.lse.is_some(), "a logsumexp"),
        ];
        refused.into_iter().find_map(|(is_some, what)| is_some.then_some(what))
    }
}

impl<E, D> StepRunner<GpuStore<D>> for Session<E>
where
    E: Engine<Device = D>,
    D: HostAccess<Memory: 'static> + Clone,
    D::Error: StdError + Send + Sync + 'static,
    Error: From<E::Error>,
{
    fn attend(
        &mut self,
        layer: StepLayer<'_, GpuStore<D>>,
        q: GpuTensor<'_, D::Memory>,
        options: &GpuAttention<'_, D::Memory>,
        outputs: &mut GpuOutputs<'_, D::Memory>,
    ) -> Result<()> {
        let StepLayer { cache, index, desc, tables, kept } = layer;
        let [k, v] = cache.store().kv(index);
        let GpuAttention { mask, alibi_slopes, sinks, .. } = *options;
        let [first, last] = cache.kept_caches().map(|cache| {
            let [k, v] = cache?.store().kv(index);
            Some(GpuKeptPages { k, v, tables: None })
        });
        let kept_pages = GpuKeptInputs { first, last };
        let inputs = GpuInputs { mask, alibi_slopes, sinks, kept: kept_pages, ..GpuInputs::new(q, k, v) };
        let kept = kept.map_or([None, None], |kept| [kept.first.as_ref(), kept.last.as_ref()]);
        Ok(self.run_paged(desc, &inputs, HostTables { tables, kept }, outputs)?)
    }
}
