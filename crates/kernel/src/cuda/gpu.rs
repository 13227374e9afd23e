//! A device and the kernels compiled for it.

#![allow(unsafe_code)]

use super::compiler::{Compiler, Program};
use super::disk::Kernels;
use super::error::Error;
use super::function::Function;
use super::grid::Grid;
use super::library;
use super::memory::Memory;
use crate::device::{Argument, Constant, Device, HostAccess, Launch, Limits, Span};
use crate::scalar::{Scalar, ScalarType};
use crate::source::{Generic, Instance};
use crate::timing::Timing;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, CUevent_flags as Flags, CUstreamCaptureStatus};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream};
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// A CUDA device, and the stream of its launches. A clone has the same device, stream and compiled kernels.
///
/// Launches return before the kernel has run; [`Memory::to_vec`] and [`Gpu::synchronize`] wait, and report
/// failures of earlier launches. An instance is compiled when it is first launched and kept in memory and on
/// disk.
#[derive(Debug, Clone)]
pub struct Gpu {
    shared: Arc<Shared>,
    stream: Arc<CudaStream>,
}

#[derive(Debug)]
struct Shared {
    context: Arc<CudaContext>,
    name: String,
    capability: (u32, u32),
    limits: Limits,
    kernels: Kernels,
    /// By address of the kernel, which is a static.
    loaded: Mutex<HashMap<usize, Vec<Loaded>>>,
}

/// An instance of a kernel with its constants, on the device.
#[derive(Debug)]
struct Loaded {
    generics: Vec<Generic>,
    constants: Vec<Constant>,
    function: Arc<Function>,
}

impl Gpu {
    /// Number of devices of this machine.
    ///
    /// # Errors
    /// [`Error::Missing`] where there is no driver, [`Error::Static`] in a program that cannot load it, [`Error::Driver`] where it does
    /// not answer.
    pub fn count() -> Result<usize, Error> {
        library::driver()?;
        cudarc::driver::result::init().map_err(Error::driver("start of the driver"))?;
        let count = CudaContext::device_count().map_err(Error::driver("count of devices"))?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The primary context of the device of a number: the one that other libraries use too.
    ///
    /// # Errors
    /// As [`Gpu::count`], and [`Error::NoDevice`].
    pub fn primary_context(ordinal: usize) -> Result<Arc<CudaContext>, Error> {
        let count = Self::count()?;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        CudaContext::new(ordinal).map_err(Error::driver("context"))
    }

    /// The device of a number, in its primary context, and a new stream.
    ///
    /// # Errors
    /// As [`Gpu::primary_context`].
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        let context = Self::primary_context(ordinal)?;
        Self::with_stream(context.new_stream().map_err(Error::driver("stream"))?)
    }

    /// The device of a stream, and that stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn with_stream(stream: Arc<CudaStream>) -> Result<Self, Error> {
        let context = stream.context().clone();
        let get = |attribute: Attribute| {
            let value = context.attribute(attribute).map_err(Error::driver("facts of the device"))?;
            Ok::<u32, Error>(u32::try_from(value).unwrap_or(0))
        };
        let capability = (
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let limits = Limits {
            threads: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK)?,
            shared_bytes: get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            groups: [
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y)?,
                get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z)?,
            ],
        };
        let name = context.name().map_err(Error::driver("name of the device"))?;
        let (kernels, loaded) = (Kernels::new(), Mutex::new(HashMap::new()));
        let shared = Shared { context, name, capability, limits, kernels, loaded };
        Ok(Self { shared: Arc::new(shared), stream })
    }

    /// The device with launches on another of its streams. Streams do not wait for each other.
    #[must_use]
    pub fn on(&self, stream: &Arc<CudaStream>) -> Self {
        Self { shared: self.shared.clone(), stream: stream.clone() }
    }

    /// The device's own name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Its compute capability: (9, 0) of an H100.
    #[must_use]
    pub fn capability(&self) -> (u32, u32) {
        self.shared.capability
    }

    /// The context in which everything happens.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.shared.context
    }

    /// The stream of launches and copies.
    #[must_use]
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Folder of compiled kernels; none where they are not kept.
    #[must_use]
    pub fn cache_folder(&self) -> Option<&Path> {
        self.shared.kernels.folder()
    }

    /// The compiler, which is loaded when it is first needed.
    ///
    /// # Errors
    /// [`Error::Missing`].
    pub fn compiler(&self) -> Result<Arc<Compiler>, Error> {
        self.shared.kernels.compiler()
    }

    /// Compiles a program or finds it compiled on disk, and loads its function `entry`, whose blocks may have up to `shared` bytes of
    /// dynamic shared memory. The second result says whether the machine code was kept on disk, which running does not need.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Compile`] or [`Error::Driver`].
    pub fn load(
        &self,
        program: &Program,
        entry: &str,
        shared: usize,
    ) -> Result<(Function, Result<(), Error>), Error> {
        let (code, kept) = self.shared.kernels.code(program, self.shared.capability)?;
        let function = Function::load(&self.shared.context, &program.name, &code, entry, shared)?;
        Ok((function, kept))
    }

    /// The function of an instance with the values of its `#[constant]` parameters, in order: compiled and loaded if it is not yet,
    /// so that no later launch waits for the compiler, and with the resources that it uses ([`Function::resources`]).
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Compile`] with line numbers of the printed source ([`Instance::source`]), or [`Error::Driver`].
    pub fn function(&self, instance: &Instance, constants: &[Constant]) -> Result<Arc<Function>, Error> {
        self.prewarm(instance, constants).map(|(function, _)| function)
    }

    /// [`Gpu::function`], and whether the machine code was kept on disk, which running does not need.
    ///
    /// # Errors
    /// As [`Gpu::function`].
    pub fn prewarm(
        &self,
        instance: &Instance,
        constants: &[Constant],
    ) -> Result<(Arc<Function>, Result<(), Error>), Error> {
        let key = std::ptr::from_ref(instance.kernel()).addr();
        let same = |loaded: &&Loaded| loaded.generics == instance.generics() && loaded.constants == constants;
        let all = || self.shared.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = all().get(&key).and_then(|list| list.iter().find(same)) {
            return Ok((loaded.function.clone(), Ok(())));
        }
        // Not under the lock: other kernels may be compiled meanwhile. Of two threads that compile the same one, the later
        // drops its own.
        let (function, kept) =
            self.load(&Program::of(instance, constants), &instance.entry(), instance.cuda_dynamic_bytes())?;
        let mut all = all();
        let list = all.entry(key).or_default();
        if let Some(loaded) = list.iter().find(same) {
            return Ok((loaded.function.clone(), kept));
        }
        let function = Arc::new(function);
        let (generics, constants) = (instance.generics().to_vec(), constants.to_vec());
        list.push(Loaded { generics, constants, function: function.clone() });
        Ok((function, kept))
    }

    /// Memory of the device that holds `values`.
    ///
    /// # Errors
    /// [`Error::Driver`], also where there is not enough.
    pub fn buffer_from<T: Scalar>(&self, values: &[T]) -> Result<Memory, Error> {
        let mut memory = self.uninit::<T>(values.len())?;
        memory.copy_from(values)?;
        Ok(memory)
    }

    /// Memory of the device for `len` uninitialised elements: reading them gives any values.
    ///
    /// # Errors
    /// [`Error::Driver`], also where there is not enough.
    pub fn uninit<T: Scalar>(&self, len: usize) -> Result<Memory, Error> {
        Memory::uninit(&self.shared.context, T::TYPE, len)
    }

    /// Memory that someone else has allocated: `len` elements at a device address.
    ///
    /// # Safety
    /// - `len` elements lie at `at`, in one allocation of the device, and `at` is a multiple of their size.
    /// - While the value exists, or work that was given it, nothing else writes the elements; where that work writes them, nothing else
    ///   accesses them.
    #[must_use]
    pub unsafe fn borrow(&self, element: ScalarType, at: u64, len: usize) -> Memory {
        // SAFETY: the caller's contract is the one of `Memory::borrow`.
        unsafe { Memory::borrow(&self.shared.context, element, at, len) }
    }

    /// Waits until all work on the stream has ended.
    ///
    /// # Errors
    /// [`Error::Driver`], also of work that failed.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.stream.synchronize().map_err(Error::driver("work of the device"))
    }

    /// How long `work` takes on the device, which puts it on the stream: once unmeasured, then `runs` times, one after another and
    /// without a wait of the host in between.
    ///
    /// # Errors
    /// The errors of the work, and [`Error::Driver`].
    pub fn time<E: From<Error>>(
        &self,
        runs: usize,
        mut work: impl FnMut() -> Result<(), E>,
    ) -> Result<Timing, E> {
        let failed = || Error::driver("measurement");
        let event = || self.shared.context.new_event(Some(Flags::CU_EVENT_DEFAULT)).map_err(failed());
        let events = (0..runs).map(|_| Ok((event()?, event()?))).collect::<Result<Vec<_>, Error>>()?;
        work()?;
        for (start, end) in &events {
            start.record(&self.stream).map_err(failed())?;
            work()?;
            end.record(&self.stream).map_err(failed())?;
        }
        let seconds = |(start, end): &(CudaEvent, CudaEvent)| {
            let milliseconds = start.elapsed_ms(end).map_err(failed())?;
            Ok::<_, Error>(f64::from(milliseconds) / 1e3)
        };
        Ok(Timing::new(events.iter().map(seconds).collect::<Result<_, _>>()?))
    }

    /// The address of the argument of a parameter.
    ///
    /// # Errors
    /// [`Error::OtherDevice`], and [`Error::Span`] where it is not inside of the memory, or not a multiple of its elements' size.
    pub fn address(
        &self,
        kernel: &'static str,
        parameter: &'static str,
        memory: &Memory,
        span: Span,
    ) -> Result<u64, Error> {
        if !memory.is_of(&self.shared.context) {
            return Err(Error::OtherDevice { kernel, parameter });
        }
        let size = span.element.bytes();
        let end = span.offset.checked_add(span.len).and_then(|n| n.checked_mul(size));
        // A memory's address is a multiple of the size of its own elements.
        let at = memory.address().saturating_add((span.offset.saturating_mul(size)) as u64);
        if end.is_none_or(|end| end > memory.bytes()) || !at.is_multiple_of(size as u64) {
            return Err(Error::Span { kernel, parameter, span, bytes: memory.bytes() });
        }
        Ok(at)
    }
}

impl Device for Gpu {
    type Memory = Memory;
    type Error = Error;

    fn limits(&self) -> Limits {
        self.shared.limits
    }

    fn captures(&self) -> Result<bool, Error> {
        let status = self.stream.capture_status().map_err(Error::driver("state of the stream"))?;
        Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    fn launch(&self, launch: Launch<'_, Memory>) -> Result<(), Error> {
        let instance = launch.instance();
        let kernel = instance.kernel();
        let mut addresses = Vec::with_capacity(kernel.parameters.len());
        for (argument, parameter) in launch.arguments().iter().zip(kernel.parameters) {
            let (memory, span) = match argument {
                Argument::Read(view) => (view.memory(), view.span()),
                Argument::Write(view) => (view.memory(), view.span()),
                Argument::Bytes(_) | Argument::Constant(_) => continue,
            };
            addresses.push(self.address(kernel.name, parameter.name, memory, span)?);
        }
        let constants: Vec<Constant> = launch.constants().collect();
        let function = self.function(instance, &constants)?;
        let mut parameters = parameters(launch.arguments(), &addresses);
        let blocks = launch.groups().map(|n| n as usize);
        let (threads, shared) = (launch.threads() as usize, instance.cuda_dynamic_bytes());
        let grid = Grid { blocks, threads, shared };
        // SAFETY: a launch holds an argument of the right kind and size for each parameter, in order, and the printed source declares
        // the same parameters, without constants, in the same order. Buffers are inside memory of this device, which lives until work that was
        // launched before its end has ended, or which its owner vouches for. That the kernel stays inside them is its contract's.
        unsafe { function.launch_with(&self.stream, grid, &mut parameters) }
    }
}

impl HostAccess for Gpu {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Memory, Error> {
        let mut memory = Memory::uninit(&self.shared.context, element, len)?;
        memory.fill_zero(&self.stream)?;
        Ok(memory)
    }

    fn uninit(&self, element: ScalarType, len: usize) -> Result<Memory, Error> {
        Memory::uninit(&self.shared.context, element, len)
    }

    fn write(&self, memory: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), Error> {
        memory.write_on(&self.stream, at, bytes)
    }

    fn read(&self, memory: &Memory, at: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.synchronize()?;
        memory.read_after(at, bytes)
    }
}

/// The memory that the driver reads parameters from: the addresses of buffers, in order, and the bytes of scalars and structs.
fn parameters<M>(arguments: &[Argument<'_, M>], addresses: &[u64]) -> Vec<*mut c_void> {
    let mut address = addresses.iter();
    let parameter = |argument: &Argument<'_, M>| -> Option<*mut c_void> {
        match argument {
            Argument::Read(_) | Argument::Write(_) => {
                address.next().map(|at| std::ptr::from_ref(at).cast_mut().cast())
            }
            Argument::Bytes(bytes) => Some(bytes.as_ptr().cast_mut().cast()),
            Argument::Constant(_) => None,
        }
    };
    arguments.iter().filter_map(parameter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator;

    #[test]
    fn parameters_point_at_addresses_and_bytes() {
        let read = simulator::Memory::from_slice(&[1u32, 2]);
        let mut written = simulator::Memory::uninit::<f32>(3);
        let arguments = [
            Argument::Read(read.view()),
            Argument::plain(&[7u32, 9]),
            Argument::constant(true),
            Argument::Write(written.view_mut()),
            Argument::plain(&-2i64),
        ];
        let addresses = [0x1000u64, 0x2000];
        let parameters = parameters(&arguments, &addresses);
        assert_eq!(parameters.len(), 4);
        let word = |n: usize| -> u64 {
            // SAFETY: each of them points at 8 bytes that live: an address, two u32 or an i64.
            unsafe { parameters[n].cast::<u64>().read_unaligned() }
        };
        assert_eq!([word(0), word(1), word(2), word(3)], [0x1000, 9 << 32 | 7, 0x2000, -2i64 as u64]);
    }
}
