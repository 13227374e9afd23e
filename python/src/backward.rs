//! Gradients of attention over arrays and tensors.

use crate::attention::Call as ForwardCall;
use crate::cuda as on_cuda;
use crate::failure::refused;
use crate::memory::{Axes, DeviceList, Memory, OnDevice, blocks};
use crate::process;
use flashtile::gpu::GpuGradients;
use flashtile::{BackwardInputs, Gradients, Runner, cuda};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Gradients of q, k, v, sinks, an additive mask and ALiBi slopes; `None` where the call does not ask for one.
pub(crate) type Results = [Option<Py<PyAny>>; 6];

/// The optional gradients that a call asks for.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    sinks: bool,
    bias: bool,
    alibi_slopes: bool,
}

/// Inputs and options of a call.
pub(crate) struct Call {
    pub(crate) forward: ForwardCall,
    pub(crate) out: Memory,
    pub(crate) lse: Memory,
    pub(crate) d_out: Memory,
    pub(crate) d_lse: Option<Memory>,
}

impl Call {
    fn new(
        [q, k, v, out, lse, d_out, d_lse]: &[Bound<'_, PyAny>; 7],
        options: &Bound<'_, PyTuple>,
    ) -> PyResult<Self> {
        let forward = ForwardCall::new([q, k, v], options)?;
        let on = |name, object| Memory::on(forward.options.stream, name, object);
        let (out, lse, d_out) = (on("out", out)?, on("lse", lse)?, on("d_out", d_out)?);
        let d_lse = (!d_lse.is_none()).then(|| on("d_lse", d_lse)).transpose()?;
        Ok(Self { forward, out, lse, d_out, d_lse })
    }

    /// All memory that the call reads, but lists of numbers.
    pub(crate) fn memory(&self) -> Vec<&Memory> {
        let mut all = self.forward.memory();
        all.extend([&self.out, &self.lse, &self.d_out]);
        all.extend(&self.d_lse);
        all
    }

    /// The gradients, in memory that `make` makes.
    fn run(&self, wanted: Wanted, make: &Bound<'_, PyAny>) -> PyResult<Results> {
        let ForwardCall { options, q, k, v } = &self.forward;
        if let Some(stream) = options.stream {
            return on_cuda::attention_backward(self, wanted, make, stream);
        }
        let (py, axes) = (make.py(), options.axes());
        let (q, k, v) = (q.view(axes)?, k.view(axes)?, v.view(axes)?);
        let [batch, heads, q_len, _] = q.shape();
        options.check_slopes(batch, heads)?;
        options.check_masks(batch, q_len, k.shape()[2])?;
        let attention = options.attention()?;
        let desc = attention.desc(&q, &k, &v);
        // A wrong problem is refused before there is memory for its result.
        let planned = py.detach(|| {
            Runner::with_current(|runner| {
                runner.plan_backward(&desc).map(|plan| plan.problem().dims().out_shape())
            })
        });
        let lse_shape = axes.lse_shape(planned.map_err(refused)?);
        let inputs = BackwardInputs {
            forward: attention.inputs(q, k, v),
            out: self.out.view(axes)?,
            lse: self.lse.list(&lse_shape)?,
            d_out: self.d_out.view(axes)?,
            d_lse: self.d_lse.as_ref().map(|d_lse| d_lse.list(&lse_shape)).transpose()?,
        };
        let mut made = Made::new(self, wanted, make)?;
        let mut gradients = made.gradients(axes, &self.memory())?;
        py.detach(|| Runner::with_current(|runner| runner.run_backward(&desc, &inputs, &mut gradients)))
            .map_err(refused)?;
        Ok(made.results())
    }
}

/// A gradient: its object and the memory of that.
struct Gradient<'py> {
    object: Bound<'py, PyAny>,
    memory: Memory,
}

/// Memory of the gradients.
pub(crate) struct Made<'py> {
    d_q: Gradient<'py>,
    d_k: Gradient<'py>,
    d_v: Gradient<'py>,
    d_sinks: Option<Gradient<'py>>,
    d_bias: Option<Gradient<'py>>,
    d_alibi_slopes: Option<Gradient<'py>>,
}

impl<'py> Made<'py> {
    /// New memory, on the device of the options' stream.
    pub(crate) fn new(call: &Call, wanted: Wanted, make: &Bound<'py, PyAny>) -> PyResult<Self> {
        let ForwardCall { options, q, k, v } = &call.forward;
        let new = |kind, name, shape: &[usize]| -> PyResult<Gradient<'py>> {
            let object = make.call1((kind, PyTuple::new(make.py(), shape)?))?;
            Ok(Gradient { memory: Memory::made(options.stream, name, &object)?, object })
        };
        // The dtype of `lse` is float32, which sums over rows have.
        let optional = |name, of: &str, is_wanted: bool, shape: Option<&[usize]>| match (is_wanted, shape) {
            (false, _) => Ok(None),
            (true, Some(shape)) => new("lse", name, shape).map(Some),
            (true, None) => Err(PyValueError::new_err(format!("{name} was asked for, and there is no {of}"))),
        };
        Ok(Self {
            d_q: new("out", "d_q", q.shape())?,
            d_k: new("out", "d_k", k.shape())?,
            d_v: new("out", "d_v", v.shape())?,
            d_sinks: optional("d_sinks", "option sinks", wanted.sinks, options.sinks_shape())?,
            d_bias: optional("d_bias", "mask that is added to scores", wanted.bias, options.bias_shape())?,
            d_alibi_slopes: optional(
                "d_alibi_slopes",
                "option alibi_slopes",
                wanted.alibi_slopes,
                options.slopes_shape(),
            )?,
        })
    }

    /// Refuses gradients that have memory in common.
    fn check_exclusive(&self) -> PyResult<()> {
        let Self { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = self;
        let mut all = vec![&d_q.memory, &d_k.memory, &d_v.memory];
        all.extend([d_sinks, d_bias, d_alibi_slopes].into_iter().flatten().map(|made| &made.memory));
        for (at, memory) in all.iter().enumerate() {
            memory.block.check_exclusive(&blocks(&all[..at]))?;
        }
        Ok(())
    }

    /// The gradients as flashtile writes them, into memory that neither they nor `others` have in common.
    fn gradients(&mut self, axes: Axes, others: &[&Memory]) -> PyResult<Gradients<'_>> {
        self.check_exclusive()?;
        let Self { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = self;
        let mut gradients = Gradients::new(
            d_q.memory.view_mut(axes, others)?,
            d_k.memory.view_mut(axes, others)?,
            d_v.memory.view_mut(axes, others)?,
        );
        gradients.d_sinks = d_sinks.as_mut().map(|made| made.memory.list_mut(others)).transpose()?;
        gradients.d_bias = d_bias.as_mut().map(|made| made.memory.list_mut(others)).transpose()?;
        gradients.d_alibi_slopes =
            d_alibi_slopes.as_mut().map(|made| made.memory.list_mut(others)).transpose()?;
        Ok(gradients)
    }

    /// Calls `run` with the gradients as work on a stream writes them.
    pub(crate) fn on_device(
        &mut self,
        axes: Axes,
        others: &[&Memory],
        on: OnDevice<'_>,
        run: impl FnOnce(&mut GpuGradients<'_, cuda::Memory>) -> PyResult<()>,
    ) -> PyResult<()> {
        self.check_exclusive()?;
        let Self { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = self;
        let mut d_q = d_q.memory.device_tensor_mut(axes, others, on)?;
        let mut d_k = d_k.memory.device_tensor_mut(axes, others, on)?;
        let mut d_v = d_v.memory.device_tensor_mut(axes, others, on)?;
        let mut d_sinks = device_list(d_sinks, others, on)?;
        let mut d_bias = device_list(d_bias, others, on)?;
        let mut d_alibi_slopes = device_list(d_alibi_slopes, others, on)?;
        let mut gradients = GpuGradients::new(
            d_q.view_mut().map_err(refused)?,
            d_k.view_mut().map_err(refused)?,
            d_v.view_mut().map_err(refused)?,
        );
        gradients.d_sinks = d_sinks.as_mut().map(DeviceList::view_mut);
        gradients.d_bias = d_bias.as_mut().map(DeviceList::view_mut);
        gradients.d_alibi_slopes = d_alibi_slopes.as_mut().map(DeviceList::view_mut);
        run(&mut gradients)
    }

    /// The objects, once their memory is written.
    pub(crate) fn results(self) -> Results {
        let Self { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = self;
        [Some(d_q), Some(d_k), Some(d_v), d_sinks, d_bias, d_alibi_slopes]
            .map(|made| made.map(|made| made.object.unbind()))
    }
}

/// An optional gradient as a list of f32 that work on a stream writes.
fn device_list<'a>(
    made: &'a mut Option<Gradient<'_>>,
    others: &[&Memory],
    on: OnDevice<'_>,
) -> PyResult<Option<DeviceList<'a>>> {
    made.as_mut().map(|made| made.memory.device_list_mut(others, on)).transpose()
}

/// Gradients of attention. `tensors` are q, k, v, out, lse, d_out and d_lse, of which the last may be `None`; `make(name, shape)` makes a
/// tensor of the kind and dtype of q where the name is `out`, and of float32 where it is `lse`.
#[pyfunction]
pub(crate) fn attention_backward(
    tensors: [Bound<'_, PyAny>; 7],
    options: &Bound<'_, PyTuple>,
    make: &Bound<'_, PyAny>,
    d_sinks: bool,
    d_bias: bool,
    d_alibi_slopes: bool,
) -> PyResult<Results> {
    process::compute()?;
    let wanted = Wanted { sinks: d_sinks, bias: d_bias, alibi_slopes: d_alibi_slopes };
    Call::new(&tensors, options)?.run(wanted, make)
}
