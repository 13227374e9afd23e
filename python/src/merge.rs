//! Attention over parts of the keys, merged.

use crate::attention::{Made, Results, Shapes};
use crate::failure::refused;
use crate::memory::{Axes, Memory};
use crate::options::Options;
use crate::process;
use flashtile::AttentionState;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Merges states `(out, lse)` over disjoint keys into `out`, or into memory that `make` makes where `out` is `None`. The options have
/// the layout.
#[pyfunction]
pub(crate) fn merge(
    states: Vec<[Bound<'_, PyAny>; 2]>,
    out: &Bound<'_, PyAny>,
    options: &Bound<'_, PyTuple>,
    make: &Bound<'_, PyAny>,
) -> PyResult<Results> {
    process::compute()?;
    let options = Options::of(options)?;
    let of = |[out, lse]: &[Bound<'_, PyAny>; 2]| Ok([Memory::of("out", out)?, Memory::of("lse", lse)?]);
    let states: Vec<[Memory; 2]> = states.iter().map(of).collect::<PyResult<_>>()?;
    let Some([first, _]) = states.first() else {
        return Err(PyValueError::new_err("merge of no states"));
    };
    let axes = if first.shape().len() == 3 { Axes::Packed } else { options.axes() };
    let shape = first.view(axes)?.shape();
    let lse_shape = axes.lse_shape(shape);
    let mut views = Vec::with_capacity(states.len());
    for [out, lse] in &states {
        views.push(AttentionState { out: out.view(axes)?, lse: lse.list(&lse_shape)? });
    }
    let mut made = Made::new(out, &options, Shapes::of(axes, shape), make)?;
    let others: Vec<&Memory> = states.iter().flatten().collect();
    let mut outputs = made.outputs(axes, &others)?;
    make.py().detach(|| flashtile::merge(&views, &mut outputs)).map_err(refused)?;
    Ok(made.results())
}
