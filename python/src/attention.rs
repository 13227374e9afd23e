//! Attention over arrays and tensors.

use crate::cuda as on_cuda;
use crate::failure::refused;
use crate::memory::{Axes, DeviceList, Memory, OnDevice};
use crate::options::Options;
use crate::process;
use crate::tensors::Plainness;
use flashtile::cuda::{self, GpuOutputs};
use flashtile::{Outputs, Runner};
use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Out, and the logsumexp where it was asked for.
pub(crate) type Results = (Py<PyAny>, Option<Py<PyAny>>);

/// Inputs and options of a call.
pub(crate) struct Call {
    pub(crate) options: Options,
    pub(crate) q: Memory,
    pub(crate) k: Memory,
    pub(crate) v: Memory,
}

impl Call {
    pub(crate) fn new([q, k, v]: [&Bound<'_, PyAny>; 3], options: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let options = Options::of(options)?;
        let on = |name, object| Memory::on(options.stream, name, object);
        let (q, k, v) = (on("q", q)?, on("k", k)?, on("v", v)?);
        Ok(Self { options, q, k, v })
    }

    /// All memory that the call reads, but lists of numbers.
    pub(crate) fn memory(&self) -> Vec<&Memory> {
        let mut all = vec![&self.q, &self.k, &self.v];
        all.extend(self.options.mask());
        all
    }

    /// Attention into `out`, or into memory that `make` makes where `out` is `None`.
    fn run(self, out: &Bound<'_, PyAny>, make: &Bound<'_, PyAny>) -> PyResult<Results> {
        if let Some(stream) = self.options.stream {
            return on_cuda::attention(&self, out, make, stream);
        }
        let Self { options, q, k, v } = &self;
        let (py, axes) = (make.py(), options.axes());
        let (q_view, k_view, v_view) = (q.view(axes)?, k.view(axes)?, v.view(axes)?);
        let [batch, heads, q_len, _] = q_view.shape();
        options.check_slopes(batch, heads)?;
        options.check_masks(batch, q_len, k_view.shape()[2])?;
        let attention = options.attention()?;
        let desc = attention.desc(&q_view, &k_view, &v_view);
        let inputs = attention.inputs(q_view, k_view, v_view);
        // A wrong problem is refused before there is memory for its result.
        let planned = py.detach(|| {
            Runner::with_current(|runner| runner.plan(&desc).map(|plan| plan.problem().dims().out_shape()))
        });
        let shape = planned.map_err(refused)?;
        let mut made = Made::new(out, options, Shapes::of(axes, shape), make)?;
        let mut outputs = made.outputs(axes, &self.memory())?;
        py.detach(|| Runner::with_current(|runner| runner.run(&desc, &inputs, &mut outputs)))
            .map_err(refused)?;
        Ok(made.results())
    }
}

/// Attention. `tensors` are q, k, v and out, which may be `None`; `make(name, shape)` makes a tensor of the kind and dtype of the result,
/// or a logsumexp of float32 where the name is `lse`.
#[pyfunction]
pub(crate) fn attention(
    tensors: [Bound<'_, PyAny>; 4],
    options: &Bound<'_, PyTuple>,
    make: &Bound<'_, PyAny>,
) -> PyResult<Results> {
    process::compute()?;
    let [q, k, v, out] = &tensors;
    Call::new([q, k, v], options)?.run(out, make)
}

/// [`attention`] where all tensors are plain, `classes` and `records` as in [`Plainness`]; `None` where they are not, or cannot be read.
#[pyfunction]
pub(crate) fn attention_plain(
    tensors: [Bound<'_, PyAny>; 4],
    options: &Bound<'_, PyTuple>,
    make: &Bound<'_, PyAny>,
    classes: &Bound<'_, PyTuple>,
    records: bool,
) -> PyResult<Option<Results>> {
    process::compute()?;
    if !(Plainness { classes, records }.holds(&tensors, options)?) {
        return Ok(None);
    }
    let [q, k, v, out] = &tensors;
    match Call::new([q, k, v], options) {
        Err(error) if is_unreadable(make.py(), &error) => Ok(None),
        call => call?.run(out, make).map(Some),
    }
}

/// True for the errors of a tensor without memory (`BufferError`), or without elements that PyTorch can list (`RuntimeError`).
fn is_unreadable(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyBufferError>(py) || error.is_instance_of::<PyRuntimeError>(py)
}

/// Shapes of the results.
pub(crate) struct Shapes {
    pub(crate) out: Vec<usize>,
    pub(crate) lse: Vec<usize>,
}

impl Shapes {
    /// Of a result `[batch, heads, rows, dim]`.
    pub(crate) fn of(axes: Axes, shape: [usize; 4]) -> Self {
        Self { out: axes.shape(shape), lse: axes.lse_shape(shape) }
    }
}

/// Memory of the results.
pub(crate) struct Made<'py> {
    objects: (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>),
    out: Memory,
    lse: Option<Memory>,
}

impl<'py> Made<'py> {
    /// `given`, or a tensor that `make` makes, and a logsumexp where the options ask for one; on the device of the options' stream.
    pub(crate) fn new(
        given: &Bound<'py, PyAny>,
        options: &Options,
        shapes: Shapes,
        make: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let new = |name: &'static str, shape: &[usize]| make.call1((name, PyTuple::new(make.py(), shape)?));
        let (out, memory) = match given.is_none() {
            true => {
                let out = new("out", &shapes.out)?;
                let memory = Memory::made(options.stream, "out", &out)?;
                (out, memory)
            }
            false => (given.clone(), Memory::on(options.stream, "out", given)?),
        };
        let lse = options.lse.then(|| new("lse", &shapes.lse)).transpose()?;
        let of_lse = lse.as_ref().map(|lse| Memory::made(options.stream, "lse", lse)).transpose()?;
        Ok(Self { objects: (out, lse), out: memory, lse: of_lse })
    }

    /// Refuses an out of another shape.
    pub(crate) fn check_out(&self, expected: &[usize]) -> PyResult<()> {
        let got = self.out.shape();
        if got != expected {
            return Err(PyValueError::new_err(format!("out has shape {got:?}, expected {expected:?}")));
        }
        Ok(())
    }

    /// Joins batch and rows of out to one axis.
    pub(crate) fn join_batch(&mut self, axes: Axes) -> PyResult<()> {
        Ok(self.out.block.join_batch(axes)?)
    }

    /// The results as flashtile writes them, into memory that neither they nor `others` have in common.
    pub(crate) fn outputs(&mut self, axes: Axes, others: &[&Memory]) -> PyResult<Outputs<'_>> {
        if let Some(lse) = &self.lse {
            lse.block.check_exclusive(&[&self.out.block])?;
        }
        let mut outputs = Outputs::new(self.out.view_mut(axes, others)?);
        outputs.lse = self.lse.as_mut().map(|lse| lse.list_mut(others)).transpose()?;
        Ok(outputs)
    }

    /// Calls `run` with the results as work on a stream writes them.
    pub(crate) fn on_device(
        &mut self,
        axes: Axes,
        others: &[&Memory],
        on: OnDevice<'_>,
        run: impl FnOnce(&mut GpuOutputs<'_, cuda::Memory>) -> PyResult<()>,
    ) -> PyResult<()> {
        if let Some(lse) = &self.lse {
            lse.block.check_exclusive(&[&self.out.block])?;
        }
        let mut out = self.out.device_tensor_mut(axes, others, on)?;
        let mut lse = self.lse.as_mut().map(|lse| lse.device_list_mut(others, on)).transpose()?;
        let mut outputs = GpuOutputs::new(out.view_mut().map_err(refused)?);
        outputs.lse = lse.as_mut().map(DeviceList::view_mut);
        run(&mut outputs)
    }

    /// The objects, once their memory is written.
    pub(crate) fn results(self) -> Results {
        let (out, lse) = self.objects;
        (out.unbind(), lse.map(Bound::unbind))
    }
}
