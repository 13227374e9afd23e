//! Gradients of attention over arrays and tensors of the host.

use crate::failure::refused;
use crate::memory::{Axes, Memory, blocks};
use crate::options::Options;
use crate::process;
use flashtile::{BackwardInputs, Gradients, Runner};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Gradients of q, k, v, sinks, an additive mask and ALiBi slopes; `None` where the call does not ask for one.
type Results = [Option<Py<PyAny>>; 6];

/// The optional gradients that a call asks for.
#[derive(Clone, Copy)]
struct Wanted {
    sinks: bool,
    bias: bool,
    alibi_slopes: bool,
}

/// Inputs and options of a call.
struct Call {
    options: Options,
    q: Memory,
    k: Memory,
    v: Memory,
    out: Memory,
    lse: Memory,
    d_out: Memory,
    d_lse: Option<Memory>,
}

impl Call {
    fn new(
        [q, k, v, out, lse, d_out, d_lse]: &[Bound<'_, PyAny>; 7],
        options: &Bound<'_, PyTuple>,
    ) -> PyResult<Self> {
        Ok(Self {
            options: Options::of(options)?,
            q: Memory::of("q", q)?,
            k: Memory::of("k", k)?,
            v: Memory::of("v", v)?,
            out: Memory::of("out", out)?,
            lse: Memory::of("lse", lse)?,
            d_out: Memory::of("d_out", d_out)?,
            d_lse: (!d_lse.is_none()).then(|| Memory::of("d_lse", d_lse)).transpose()?,
        })
    }

    /// All memory that the call reads.
    fn memory(&self) -> Vec<&Memory> {
        let mut all = vec![&self.q, &self.k, &self.v, &self.out, &self.lse, &self.d_out];
        all.extend(&self.d_lse);
        all.extend(self.options.mask());
        all
    }

    /// The gradients, in memory that `make` makes.
    fn run(&self, wanted: Wanted, make: &Bound<'_, PyAny>) -> PyResult<Results> {
        let (py, options, axes) = (make.py(), &self.options, self.options.axes());
        let (q, k, v) = (self.q.view(axes)?, self.k.view(axes)?, self.v.view(axes)?);
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
struct Made<'py> {
    d_q: Gradient<'py>,
    d_k: Gradient<'py>,
    d_v: Gradient<'py>,
    d_sinks: Option<Gradient<'py>>,
    d_bias: Option<Gradient<'py>>,
    d_alibi_slopes: Option<Gradient<'py>>,
}

impl<'py> Made<'py> {
    fn new(call: &Call, wanted: Wanted, make: &Bound<'py, PyAny>) -> PyResult<Self> {
        let new = |kind, name, shape: &[usize]| -> PyResult<Gradient<'py>> {
            let object = make.call1((kind, PyTuple::new(make.py(), shape)?))?;
            Ok(Gradient { memory: Memory::made(None, name, &object)?, object })
        };
        // The dtype of `lse` is float32, which sums over rows have.
        let optional = |name, of: &str, is_wanted: bool, shape: Option<&[usize]>| match (is_wanted, shape) {
            (false, _) => Ok(None),
            (true, Some(shape)) => new("lse", name, shape).map(Some),
            (true, None) => Err(PyValueError::new_err(format!("{name} was asked for, and there is no {of}"))),
        };
        let options = &call.options;
        Ok(Self {
            d_q: new("out", "d_q", call.q.shape())?,
            d_k: new("out", "d_k", call.k.shape())?,
            d_v: new("out", "d_v", call.v.shape())?,
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

    /// The gradients as flashtile writes them, into memory that neither they nor `others` have in common.
    fn gradients(&mut self, axes: Axes, others: &[&Memory]) -> PyResult<Gradients<'_>> {
        let Self { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = self;
        let mut all = vec![&d_q.memory, &d_k.memory, &d_v.memory];
        all.extend([&*d_sinks, &*d_bias, &*d_alibi_slopes].into_iter().flatten().map(|made| &made.memory));
        for (at, memory) in all.iter().enumerate() {
            memory.block.check_exclusive(&blocks(&all[..at]))?;
        }
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

    /// The objects, once their memory is written.
    fn results(self) -> Results {
        let Self { d_q, d_k, d_v, d_sinks, d_bias, d_alibi_slopes } = self;
        [Some(d_q), Some(d_k), Some(d_v), d_sinks, d_bias, d_alibi_slopes]
            .map(|made| made.map(|made| made.object.unbind()))
    }
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
