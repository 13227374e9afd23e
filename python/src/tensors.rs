//! Tensors of PyTorch, asked for what their memory does not say.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyString, PyTuple};

/// Tensors that are their elements in memory, and of which nobody records how they are used.
pub(crate) struct Plain<'a, 'py> {
    /// Classes of tensors without operators of their own.
    pub(crate) classes: &'a Bound<'py, PyTuple>,
    /// Whether autograd records.
    pub(crate) records: bool,
}

impl<'py> Plain<'_, 'py> {
    /// Whether all of `tensors` and those among the options are plain: of the classes, neither views that negate, nor differentiated.
    /// Whatever else makes a tensor more than its elements leaves it without memory, so that reading it is refused.
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
        self.are_options(options.iter())
    }

    fn is_tensor(&self, x: &Bound<'py, PyAny>) -> PyResult<bool> {
        let (py, class) = (x.py(), x.get_type());
        Ok(self.classes.iter_borrowed().any(|plain| class.is(plain))
            && !(self.records && x.getattr(intern!(py, "requires_grad"))?.is_truthy()?)
            && !x.call_method0(intern!(py, "is_neg"))?.is_truthy()?)
    }

    /// Whether an option is a number, a name, a list of them, or a plain tensor.
    fn is_option(&self, x: &Bound<'py, PyAny>) -> PyResult<bool> {
        let is_word = x.is_none()
            || x.is_exact_instance_of::<PyBool>()
            || x.is_exact_instance_of::<PyString>()
            || x.is_exact_instance_of::<PyInt>()
            || x.is_exact_instance_of::<PyFloat>();
        if is_word {
            return Ok(true);
        }
        if let Ok(tuple) = x.cast_exact::<PyTuple>() {
            return self.are_options(tuple.iter());
        }
        if let Ok(list) = x.cast_exact::<PyList>() {
            return self.are_options(list.iter());
        }
        self.is_tensor(x)
    }

    fn are_options(&self, mut items: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<bool> {
        items.try_fold(true, |all, item| Ok(all && self.is_option(&item)?))
    }
}
