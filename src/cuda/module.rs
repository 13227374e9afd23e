//! A compiled kernel on a device.

#![allow(unsafe_code)]

use super::error::CudaError;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// A function of a loaded module.
pub(super) struct Function {
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

/// How many threads, in how many blocks, with how much shared memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) grid: [usize; 3],
    pub(super) threads: usize,
    pub(super) shared: usize,
}

impl Function {
    /// Loads machine code, and the function `entry` in it; blocks of threads may have so much shared memory.
    pub(super) fn load(
        context: &Arc<CudaContext>,
        name: &str,
        code: &[u8],
        entry: &str,
        shared: usize,
    ) -> Result<Self, CudaError> {
        let failed = |what: &str| CudaError::driver(format!("{name}: {what}"));
        context.bind_to_thread().map_err(failed("context"))?;
        // Text for the driver ends in 0; machine code does not mind.
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
        // SAFETY: the function is of the module above.
        unsafe { result::function::set_function_attribute(this.function, attribute, shared as i32) }
            .map_err(failed("shared memory"))?;
        Ok(this)
    }

    /// Launches with one parameter.
    ///
    /// # Safety
    /// `params` is what the kernel takes, and its addresses are those of memory that the kernel may access as it does.
    pub(super) unsafe fn launch<P>(
        &self,
        stream: &CudaStream,
        shape: Shape,
        params: &P,
    ) -> Result<(), CudaError> {
        let failed = |error| CudaError::driver(format!("{}: launch", self.name))(error);
        self.context.bind_to_thread().map_err(failed)?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let [x, y, z] = shape.grid.map(|n| n as u32);
        // SAFETY: the function is loaded in this context; the driver copies the parameter before it returns. The rest is the
        // caller's promise.
        unsafe {
            result::launch_kernel(
                self.function,
                (x, y, z),
                (shape.threads as u32, 1, 1),
                shape.shared as u32,
                stream.cu_stream(),
                &mut arguments,
            )
        }
        .map_err(failed)
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        // Errors here are those of work that went wrong before; whoever waits for it is told.
        let _ = self.context.bind_to_thread();
        // SAFETY: the module was loaded by `load`, and nothing else has its handle.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
