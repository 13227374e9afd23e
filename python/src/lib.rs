//! The extension module `flashtile._flashtile`: it converts Python arguments to problems of flashtile. The
//! functions that users call are in the Python files beside it.

mod attention;
mod backward;
mod cache;
mod cuda;
mod cuda_cache;
mod failure;
mod memory;
mod merge;
mod options;
mod plan;
mod process;
mod quality;
mod tensors;
mod with_cache;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// The module.
#[pymodule]
fn _flashtile(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("CODECS", PyTuple::new(module.py(), flashtile::Codec::ALL.map(flashtile::Codec::name))?)?;
    module.add("OPTIONS", PyTuple::new(module.py(), options::NAMES)?)?;
    module.add_function(wrap_pyfunction!(attention::attention, module)?)?;
    module.add_function(wrap_pyfunction!(backward::attention_backward, module)?)?;
    module.add_function(wrap_pyfunction!(with_cache::attention_with_cache, module)?)?;
    module.add_function(wrap_pyfunction!(merge::merge, module)?)?;
    module.add_function(wrap_pyfunction!(options::check_options, module)?)?;
    module.add_function(wrap_pyfunction!(plan::plan, module)?)?;
    module.add_function(wrap_pyfunction!(quality::kv_pair, module)?)?;
    module.add_function(wrap_pyfunction!(attention::attention_plain, module)?)?;
    module.add_class::<cache::Cache>()?;
    module.add_class::<cache::Sequence>()?;
    module.add_class::<cache::Snapshot>()?;
    module.add_class::<cache::Step>()
}
