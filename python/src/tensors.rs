//! Checks of PyTorch tensors for properties that their memory does not show.

use crate::memory::is_numpy;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};

/// The criteria of a plain tensor, which is its elements in memory: nobody records its use, and no operator is its own.
pub(crate) struct Plainness<'a, 'py> {
    /// Classes of tensors without operators of their own.
    pub(crate) classes: &'a Bound<'py, PyTuple>,
    /// True where autograd records.
    pub(crate) records: bool,
}

/// Depth of lists: a pair of lists of numbers.
const MAX_DEPTH: usize = 2;

impl<'py> Plainness<'_, 'py> {
    /// True where all of `tensors` and those among the options are plain: of the classes, neither views that negate, nor differentiated.
    /// Whatever else makes a tensor more than its elements leaves its storage without memory, so that reading it is refused.
    pub(crate) fn holds(
        &self,
        tensors: &[Bound<'py, PyAny>],
        options: &Bound<'py, PyTuple>,
    ) -> PyResult<bool> {
        for tensor in tensors {
            if !tensor.is_none() && !self.is_tensor(tensor)? {
                return Ok(false);
            }
        }
        self.are_options(options.iter(), 0)
    }

    fn is_tensor(&self, x: &Bound<'py, PyAny>) -> PyResult<bool> {
        let (py, class) = (x.py(), x.get_type());
        Ok(self.classes.iter_borrowed().any(|plain| class.is(plain))
            && !(self.records && x.getattr(intern!(py, "requires_grad"))?.is_truthy()?)
            && !x.call_method0(intern!(py, "is_neg"))?.is_truthy()?)
    }

    /// True for a number, a name, an array, a list of numbers, and a plain tensor.
    fn is_option(&self, x: &Bound<'py, PyAny>, depth: usize) -> PyResult<bool> {
        let is_scalar = x.is_none()
            || x.is_exact_instance_of::<PyBool>()
            || x.is_exact_instance_of::<PyString>()
            || x.is_exact_instance_of::<PyInt>()
            || x.is_exact_instance_of::<PyFloat>();
        if is_scalar {
            return Ok(true);
        }
        if depth < MAX_DEPTH {
            if let Ok(tuple) = x.cast_exact::<PyTuple>() {
                return self.are_options(tuple.iter(), depth + 1);
            }
            if let Ok(list) = x.cast_exact::<PyList>() {
                return self.are_options(list.iter(), depth + 1);
            }
        }
        Ok(is_numpy(x)? || is_numpy_scalar(x)? || self.is_tensor(x)?)
    }

    fn are_options(
        &self,
        mut items: impl Iterator<Item = Bound<'py, PyAny>>,
        depth: usize,
    ) -> PyResult<bool> {
        items.try_fold(true, |all, item| Ok(all && self.is_option(&item, depth)?))
    }
}

fn is_numpy_scalar(x: &Bound<'_, PyAny>) -> PyResult<bool> {
    static GENERIC: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    x.is_instance(GENERIC.import(x.py(), "numpy", "generic")?)
}
