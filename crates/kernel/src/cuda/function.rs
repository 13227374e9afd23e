//! A compiled kernel on a device.

#![allow(unsafe_code)]

use super::error::Error;
use super::grid::Grid;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// A function of a loaded module.
pub struct Function {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    function: sys::CUfunction,
    name: String,
}

// SAFETY: handles of the driver, which any thread may use.
unsafe impl Send for Function {}
// SAFETY: as for Send; nothing is changed after loading.
unsafe impl Sync for Function {}

impl std::fmt::Debug for Function {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Function").field("name", &self.name).finish()
    }
}

/// The resources of the device that a function uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Resources {
    /// Registers of a thread.
    pub registers: usize,
    /// Bytes of static shared memory of a block, without dynamic shared memory.
    pub shared: usize,
    /// Bytes of local memory of a thread: spilled registers and arrays.
    pub local: usize,
    /// Bytes of constants, without parameters.
    pub constant: usize,
    /// The greatest number of threads of a block that these registers allow.
    pub threads: usize,
}

impl Function {
    /// Loads machine code and its function `entry`, whose blocks may have up to `shared` bytes of dynamic shared memory.
    pub(super) fn load(
        context: &Arc<CudaContext>,
        name: &str,
        code: &[u8],
        entry: &str,
        shared: usize,
    ) -> Result<Self, Error> {
        let failed = |what: &str| Error::driver(format!("{name}: {what}"));
        context.bind_to_thread().map_err(failed("context"))?;
        // PTX for the driver ends in 0; machine code may too.
        let mut image = code.to_vec();
        image.push(0);
        let entry = CString::new(entry).unwrap_or_default();
        // SAFETY: the image is what NVRTC made, whole by its digest; the context is current.
        let module = unsafe { result::module::load_data(image.as_ptr().cast()) }.map_err(failed("load"))?;
        // SAFETY: the module was loaded above. From here on the module is unloaded when the value is dropped.
        let function = unsafe { result::module::get_function(module, entry) };
        let mut this =
            Self { context: context.clone(), module, function: std::ptr::null_mut(), name: name.to_owned() };
        this.function = function.map_err(failed("look-up of its entry"))?;
        let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // A number that does not fit i32 is more than any device has: the driver refuses it.
        let shared = i32::try_from(shared).unwrap_or(i32::MAX);
        // SAFETY: the function is of the module above.
        unsafe { result::function::set_function_attribute(this.function, attribute, shared) }
            .map_err(failed("shared memory"))?;
        Ok(this)
    }

    /// The program's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The resources that it uses.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn resources(&self) -> Result<Resources, Error> {
        use sys::CUfunction_attribute_enum as Attribute;
        let failed = || Error::driver(format!("{}: resources", self.name));
        self.context.bind_to_thread().map_err(failed())?;
        let get = |attribute: Attribute| {
            // SAFETY: the function is loaded in this context.
            let value = unsafe { result::function::get_function_attribute(self.function, attribute) };
            value.map(|n| usize::try_from(n).unwrap_or(0)).map_err(failed())
        };
        Ok(Resources {
            registers: get(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            shared: get(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local: get(Attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
            constant: get(Attribute::CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES)?,
            threads: get(Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
        })
    }

    /// Launches with one parameter.
    ///
    /// # Errors
    /// [`Error::Driver`], or [`Error::Grid`].
    ///
    /// # Safety
    /// As [`Function::launch_with`], for the one parameter `params`.
    pub unsafe fn launch<P>(&self, stream: &CudaStream, grid: Grid, params: &P) -> Result<(), Error> {
        // SAFETY: the caller's contract is the one of `launch_with`.
        unsafe { self.launch_with(stream, grid, &mut [std::ptr::from_ref(params).cast_mut().cast()]) }
    }

    /// Launches with parameters that lie at addresses of the host, and returns before the kernel has run. The driver copies the
    /// parameters before that, and writes none.
    ///
    /// # Errors
    /// [`Error::Driver`], or [`Error::Grid`].
    ///
    /// # Safety
    /// - `parameters` point to the kernel's parameters, in number, order and layout.
    /// - Device addresses among them point to memory that the kernel may access as it does, until it has run.
    pub unsafe fn launch_with(
        &self,
        stream: &CudaStream,
        grid: Grid,
        parameters: &mut [*mut c_void],
    ) -> Result<(), Error> {
        let Some(([x, y, z], threads, shared)) = grid.numbers() else {
            return Err(Error::Grid { kernel: self.name.clone(), grid });
        };
        let failed = |error| Error::driver(format!("{}: launch", self.name))(error);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: the function is loaded in this context; the driver only reads through the addresses. The caller vouches for the parameters.
        unsafe {
            result::launch_kernel(
                self.function,
                (x, y, z),
                (threads, 1, 1),
                shared,
                stream.cu_stream(),
                parameters,
            )
        }
        .map_err(failed)
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // An error here belongs to earlier work, and is reported to whoever waits for that work.
        let _ = self.context.bind_to_thread();
        // SAFETY: the module was loaded by `load`, and nothing else has its handle.
        let _ = unsafe { result::module::unload(self.module) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_the_driver_cannot_be_told_are_none() {
        let grid = Grid { blocks: [1, 2, u32::MAX as usize], threads: 256, shared: 48 << 10 };
        assert_eq!(grid.numbers(), Some(([1, 2, u32::MAX], 256, 48 << 10)));
        let wide = (1 << 32) + 1;
        for axis in 0..3 {
            let mut blocks = grid.blocks;
            blocks[axis] = wide;
            assert_eq!(Grid { blocks, ..grid }.numbers(), None);
        }
        assert_eq!(Grid { threads: wide, ..grid }.numbers(), None);
        assert_eq!(Grid { shared: wide, ..grid }.numbers(), None);
    }
}
