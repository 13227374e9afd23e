//! Attention over arrays and tensors.

use crate::failure::refused;
use crate::memory::{Axes, Memory};
use crate::options::Options;
use flashtile::{Outputs, Runner};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::sync::OnceLock;

/// Out, and the logsumexp where it was asked for.
pub(crate) type Results = (Py<PyAny>, Option<Py<PyAny>>);

/// Attention. `tensors` are q, k, v and out, which may be `None`; `make(name, shape)` makes a tensor of the kind and dtype of the result,
/// or a logsumexp of float32 where the name is `lse`.
#[pyfunction]
pub(crate) fn attention(
    tensors: [Bound<'_, PyAny>; 4],
    options: &Bound<'_, PyDict>,
    make: &Bound<'_, PyAny>,
) -> PyResult<Results> {
    let py = make.py();
    check_process()?;
    let [q, k, v, out] = &tensors;
    let options = Options::of(options)?;
    let axes = options.axes();
    let (q, k, v) = (Memory::of("q", q)?, Memory::of("k", k)?, Memory::of("v", v)?);
    let (q_view, k_view, v_view) = (q.view(axes)?, k.view(axes)?, v.view(axes)?);
    let attention = options.attention()?;
    let desc = attention.desc(&q_view, &k_view, &v_view);
    let inputs = attention.inputs(q_view, k_view, v_view);
    // A wrong problem is refused before there is memory for its result.
    let planned = py.detach(|| {
        Runner::with_current(|runner| runner.plan(&desc).map(|plan| plan.problem().dims().out_shape()))
    });
    let shape = planned.map_err(refused)?;
    let mut made = Made::new(out, &options, (axes, shape), make)?;
    let mut others = vec![&q, &k, &v];
    others.extend(options.mask());
    let mut outputs = made.outputs(axes, &others)?;
    py.detach(|| Runner::with_current(|runner| runner.run(&desc, &inputs, &mut outputs))).map_err(refused)?;
    Ok(made.results())
}

/// Memory of the results.
pub(crate) struct Made<'py> {
    objects: (Bound<'py, PyAny>, Option<Bound<'py, PyAny>>),
    out: Memory,
    lse: Option<Memory>,
}

impl<'py> Made<'py> {
    /// What was given as out, or what `make` makes for a result `[batch, heads, rows, dim]`, and the same of a logsumexp that is asked for.
    pub(crate) fn new(
        given: &Bound<'py, PyAny>,
        options: &Options,
        (axes, shape): (Axes, [usize; 4]),
        make: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let out = if given.is_none() { make.call1(("out", axes.shape(shape)))? } else { given.clone() };
        let lse = options.lse.then(|| make.call1(("lse", axes.lse_shape(shape)))).transpose()?;
        let memory = Memory::of("out", &out)?;
        let of_lse = lse.as_ref().map(|lse| Memory::of("lse", lse)).transpose()?;
        Ok(Self { objects: (out, lse), out: memory, lse: of_lse })
    }

    /// The results as flashtile writes them, into memory that neither they nor `others` have in common.
    pub(crate) fn outputs(&mut self, axes: Axes, others: &[&Memory]) -> PyResult<Outputs<'_>> {
        if let Some(lse) = &self.lse {
            lse.check_exclusive(&[&self.out])?;
        }
        let mut outputs = Outputs::new(self.out.view_mut(axes, others)?);
        outputs.lse = self.lse.as_mut().map(|lse| lse.list_mut(others)).transpose()?;
        Ok(outputs)
    }

    /// The objects, once their memory is written.
    pub(crate) fn results(self) -> Results {
        let (out, lse) = self.objects;
        (out.unbind(), lse.map(Bound::unbind))
    }
}

/// Refuses to wait forever: threads of the pool do not exist in a process that was forked off.
pub(crate) fn check_process() -> PyResult<()> {
    static FIRST: OnceLock<u32> = OnceLock::new();
    let this = std::process::id();
    match *FIRST.get_or_init(|| this) {
        first if first == this => Ok(()),
        first => Err(PyRuntimeError::new_err(format!(
            "process {this} was forked off process {first} after flashtile had computed there, and has no threads: start it with spawn"
        ))),
    }
}
