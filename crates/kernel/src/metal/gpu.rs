//! A device, and where its launches go.

#![allow(unsafe_code)]

use super::encoder::{Binding, Dispatch, DispatchType, ForeignEncoder, MAX_BYTES, Recorder, whole};
use super::error::Error;
use super::host::HostPages;
use super::memory::{Memory, Ticket};
use super::object::{Buffer, CommandBuffer, CommandQueue, ComputeEncoder, MetalDevice, SharedEvent};
use super::pipeline::{Compiled, Pipelines};
use super::queue::Queue;
use super::write::write_bytes;
use crate::device::{Argument, Constant, Device, HostAccess, Launch, Limits, Span};
use crate::scalar::{Scalar, ScalarType};
use crate::source::Instance;
use crate::timing::Timing;
use objc2::rc::autoreleasepool;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSString, NSURL};
use objc2_metal::{
    MTLBuffer, MTLCaptureDescriptor, MTLCaptureDestination, MTLCaptureManager, MTLCommandBuffer,
    MTLCommandQueue, MTLCreateSystemDefaultDevice, MTLDevice, MTLResourceOptions,
};
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(target_vendor = "apple")]
#[link(name = "CoreGraphics", kind = "framework")]
// The default device of macOS is found through it.
unsafe extern "C" {}

/// A Metal device, and where its launches are encoded: command buffers of a queue, or an encoder of the caller's. A clone has the same.
///
/// Launches on a queue return before the kernel has run. They go to an open command buffer, which is committed by [`Gpu::commit`],
/// [`Gpu::synchronize`] and reads of results, and by the 64th launch. An instance is compiled when it is first launched, and kept in
/// memory and on disk.
#[derive(Debug, Clone)]
pub struct Gpu {
    shared: Arc<Shared>,
    target: Target,
}

#[derive(Debug)]
struct Shared {
    device: MetalDevice,
    name: String,
    limits: Limits,
    pipelines: Pipelines,
}

/// Bytes of one launch that writes.
const MAX_WRITE: usize = 1 << 30;

/// Where launches go.
#[derive(Debug, Clone)]
enum Target {
    Queue(Arc<Queue>),
    Encoder(Arc<Lent>),
}

/// An encoder of the caller's.
#[derive(Debug)]
struct Lent {
    /// None once the encoder has ended.
    recorder: Mutex<Option<Recorder>>,
    /// Of its command buffer. Where that is not known it never completes.
    ticket: Arc<Ticket>,
    /// Of the queue, when the encoder was lent.
    failures: u64,
}

impl Gpu {
    /// The system's default device, and a new queue.
    ///
    /// # Errors
    /// [`Error::NoDevice`] or [`Error::NoObject`].
    pub fn system_default() -> Result<Self, Error> {
        Self::new(MTLCreateSystemDefaultDevice().ok_or(Error::NoDevice)?)
    }

    /// A device, and a new queue.
    ///
    /// # Errors
    /// [`Error::NoObject`].
    pub fn new(device: MetalDevice) -> Result<Self, Error> {
        let queue = device.newCommandQueue().ok_or(Error::NoObject { what: "command queue" })?;
        queue.setLabel(Some(&NSString::from_str("flashtile")));
        Ok(Self::with_queue(queue))
    }

    /// The device of a queue, and that queue, whose launches follow each other.
    #[must_use]
    pub fn with_queue(queue: CommandQueue) -> Self {
        let shared = autoreleasepool(|_| Shared::new(queue.device()));
        Self { shared: Arc::new(shared), target: Target::queue(queue, DispatchType::Serial) }
    }

    /// The device, its pipelines shared, with launches on another queue, ordered by `dispatch`. Launches of
    /// different queues do not wait for each other: [`Gpu::signal`] and [`Gpu::wait_for`] order them.
    #[must_use]
    pub fn on(&self, queue: CommandQueue, dispatch: DispatchType) -> Self {
        Self { shared: Arc::clone(&self.shared), target: Target::queue(queue, dispatch) }
    }

    /// The device with launches that go to an encoder of the caller's, who ends it.
    ///
    /// In a concurrent encoder barriers lie between launches of this value that depend on each other; the caller orders them with its own
    /// commands.
    ///
    /// # Safety
    /// - While this value and its clones exist, the encoder is open and no other thread uses it during their
    ///   launches.
    /// - Its command buffer retains the objects that it uses, or the memory that launches use, that of
    ///   sessions included, lives until the command buffer has completed.
    #[must_use]
    pub unsafe fn in_encoder(&self, encoder: ComputeEncoder) -> Self {
        self.recorded_by(Recorder::new(encoder), Ticket::foreign())
    }

    /// The device with launches that go to an encoder that another library wraps, orders and ends:
    /// [`Gpu::in_encoder`] where the encoder itself cannot be had.
    ///
    /// # Safety
    /// As [`Gpu::in_encoder`].
    #[must_use]
    pub unsafe fn in_foreign_encoder(&self, encoder: Box<dyn ForeignEncoder>) -> Self {
        self.recorded_by(Recorder::foreign(encoder), Ticket::foreign())
    }

    fn recorded_by(&self, recorder: Recorder, ticket: impl Into<Arc<Ticket>>) -> Self {
        let ticket = ticket.into();
        let lent = Lent { recorder: Mutex::new(Some(recorder)), ticket, failures: self.failures() };
        Self { shared: Arc::clone(&self.shared), target: Target::Encoder(Arc::new(lent)) }
    }

    /// Calls `work` with this device, whose launches go to a new encoder of a command buffer of this queue's
    /// that the caller commits. Earlier launches are executed before. Other clones are not affected; clones
    /// of the device that `work` gets launch nothing afterwards.
    ///
    /// # Errors
    /// [`Error::OtherQueue`], [`Error::Unretained`] or [`Error::NoObject`]; [`Error::NotCommitted`] where launches of this value go to an encoder
    /// already.
    pub fn encode<T>(
        &self,
        commands: &CommandBuffer,
        dispatch: DispatchType,
        work: impl FnOnce(&Self) -> T,
    ) -> Result<T, Error> {
        autoreleasepool(|_| {
            let Target::Queue(queue) = &self.target else { return Err(Error::NotCommitted) };
            let of: &ProtocolObject<dyn MTLCommandQueue> = &commands.commandQueue();
            if !std::ptr::eq(of, &**queue.queue()) {
                return Err(Error::OtherQueue);
            }
            if !commands.retainedReferences() {
                return Err(Error::Unretained);
            }
            let ticket = queue.lend(commands);
            let encoder = commands.computeCommandEncoderWithDispatchType(dispatch.into());
            let encoder = encoder.ok_or(Error::NoObject { what: "compute encoder" })?;
            let gpu = self.recorded_by(Recorder::new(encoder), ticket);
            let _ending = Ending(&gpu);
            Ok(work(&gpu))
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &MetalDevice {
        &self.shared.device
    }

    /// The device's own name: `Apple M3 Max`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The queue of launches; none where they go to an encoder of the caller's.
    #[must_use]
    pub fn queue(&self) -> Option<&CommandQueue> {
        match &self.target {
            Target::Queue(queue) => Some(queue.queue()),
            Target::Encoder(_) => None,
        }
    }

    /// How launches of a command buffer follow each other; none where they go to an encoder of the caller's.
    #[must_use]
    pub fn dispatch_type(&self) -> Option<DispatchType> {
        match &self.target {
            Target::Queue(queue) => Some(queue.dispatch()),
            Target::Encoder(_) => None,
        }
    }

    /// Folder of compiled kernels; none where they are not kept.
    #[must_use]
    pub fn cache_folder(&self) -> Option<&Path> {
        self.shared.pipelines.folder()
    }

    /// Compiles the pipeline of an instance with the values of its `#[constant]` parameters, in order, if it is not yet, and returns the
    /// most threads that a threadgroup of it may have: no later launch waits for the compiler. The second result says whether the pipeline
    /// was kept on disk, which running does not need.
    ///
    /// # Errors
    /// [`Error::Compile`] with line numbers of the printed source ([`Instance::source`]), or [`Error::Pipeline`].
    pub fn prewarm(
        &self,
        instance: &Instance,
        constants: &[Constant],
    ) -> Result<(u32, Result<(), Error>), Error> {
        let (compiled, kept) = self.shared.pipelines.get(&self.shared.device, instance, constants)?;
        Ok((compiled.max_threads, kept))
    }

    /// The bytes that [`Gpu::remember`] has kept under these names.
    #[doc(hidden)]
    #[must_use]
    pub fn recall(&self, names: &[&str]) -> Option<Vec<u8>> {
        self.shared.pipelines.archives().recall(names)
    }

    /// Keeps a small result that depends on the device and its system, in the folder of compiled kernels.
    ///
    /// # Errors
    /// [`Error::KernelFolder`].
    #[doc(hidden)]
    pub fn remember(&self, names: &[&str], result: &[u8]) -> Result<(), Error> {
        self.shared.pipelines.archives().remember(names, result)
    }

    /// Memory of the device that holds `values`.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn buffer_from<T: Scalar>(&self, values: &[T]) -> Result<Memory, Error> {
        let mut memory = self.uninit::<T>(values.len())?;
        let size = T::TYPE.bytes();
        let bytes: Vec<u8> =
            values.iter().flat_map(|x| x.to_raw().to_le_bytes().into_iter().take(size)).collect();
        // SAFETY: the memory is new.
        unsafe { memory.write(0, &bytes) };
        Ok(memory)
    }

    /// Memory of the device for `len` uninitialised elements: reading them gives any values.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn uninit<T: Scalar>(&self, len: usize) -> Result<Memory, Error> {
        Memory::uninit(&self.shared.device, T::TYPE, len)
    }

    /// Whole pages of the host's memory as memory of the device, without a copy.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn adopt(&self, pages: HostPages, element: ScalarType) -> Result<Memory, Error> {
        pages.adopt(&self.shared.device, element)
    }

    /// Elements of a buffer that someone else has allocated, such as a tensor of another library: `len` from byte `offset` on.
    ///
    /// # Errors
    /// [`Error::Range`] where they are not inside of the buffer, or `offset` is no multiple of their size.
    ///
    /// # Safety
    /// While work that was given the value is not complete, nothing else writes the elements; where that work writes them, nothing else
    /// accesses them. Work on other queues, and work on buffers whose hazards Metal does not track, is ordered by the caller.
    pub unsafe fn borrow(
        &self,
        buffer: Buffer,
        offset: usize,
        element: ScalarType,
        len: usize,
    ) -> Result<Memory, Error> {
        let (size, whole) = (element.bytes(), buffer.length());
        let bytes = len.saturating_mul(size);
        let end = offset.checked_add(bytes);
        if end.is_none_or(|end| end > whole) || !offset.is_multiple_of(size) {
            return Err(Error::Range { offset, bytes, buffer: whole });
        }
        Ok(Memory::of(buffer, offset, element, len).borrowed())
    }

    /// The elements of a memory, once all launches before have completed.
    ///
    /// # Errors
    /// [`Error::Element`]; as [`HostAccess::read`].
    pub fn to_vec<T: Scalar>(&self, memory: &Memory) -> Result<Vec<T>, Error> {
        if memory.element() != T::TYPE {
            return Err(Error::Element { expected: T::TYPE, found: memory.element() });
        }
        let mut bytes = vec![0u8; memory.len() * T::TYPE.bytes()];
        self.read(memory, 0, &mut bytes)?;
        let value = |bytes: &[u8]| {
            let mut raw = [0; 8];
            raw[..bytes.len()].copy_from_slice(bytes);
            T::from_raw(u64::from_le_bytes(raw))
        };
        Ok(bytes.chunks_exact(T::TYPE.bytes()).map(value).collect())
    }

    /// Commits the launches so far, so that they start. Launches in an encoder of the caller's are committed
    /// by the caller.
    pub fn commit(&self) {
        if let Target::Queue(queue) = &self.target {
            queue.commit();
        }
    }

    /// Commits, and waits until all launches have completed.
    ///
    /// # Errors
    /// [`Error::Execution`], the first failure of a command buffer that was not reported yet; [`Error::NotCommitted`] where launches go to
    /// an encoder of the caller's.
    pub fn synchronize(&self) -> Result<(), Error> {
        match &self.target {
            Target::Queue(queue) => queue.synchronize(),
            Target::Encoder(_) => Err(Error::NotCommitted),
        }
    }

    /// A new event, of value 0.
    ///
    /// # Errors
    /// [`Error::NoObject`].
    pub fn shared_event(&self) -> Result<SharedEvent, Error> {
        self.shared.device.newSharedEvent().ok_or(Error::NoObject { what: "shared event" })
    }

    /// Makes later launches wait until an event has at least a value.
    ///
    /// # Errors
    /// [`Error::NoObject`]; [`Error::NotCommitted`] where launches go to an encoder of the caller's.
    pub fn wait_for(&self, event: &SharedEvent, value: u64) -> Result<(), Error> {
        match &self.target {
            Target::Queue(queue) => queue.wait_for(event, value),
            Target::Encoder(_) => Err(Error::NotCommitted),
        }
    }

    /// Commits, and gives an event a value once all launches up to now have completed.
    ///
    /// # Errors
    /// As [`Gpu::wait_for`].
    pub fn signal(&self, event: &SharedEvent, value: u64) -> Result<(), Error> {
        match &self.target {
            Target::Queue(queue) => queue.signal(event, value),
            Target::Encoder(_) => Err(Error::NotCommitted),
        }
    }

    /// How long `work` takes on the GPU, which launches it: once unmeasured, then `runs` times, each in command buffers of its own.
    ///
    /// # Errors
    /// The errors of the work and of its command buffers.
    pub fn time<E: From<Error>>(
        &self,
        runs: usize,
        work: impl FnMut() -> Result<(), E>,
    ) -> Result<Timing, E> {
        match &self.target {
            Target::Queue(queue) => Ok(Timing::new(queue.time(runs, work)?)),
            Target::Encoder(_) => Err(Error::NotCommitted.into()),
        }
    }

    /// Captures the launches of `work` on this queue to a `.gputrace` document that Xcode opens. The system
    /// allows it only in processes whose environment has `METAL_CAPTURE_ENABLED=1`.
    ///
    /// # Errors
    /// [`Error::Capture`] where the system does not allow it, or there is such a file; the errors of the work and of its command buffers.
    pub fn capture<T, E: From<Error>>(
        &self,
        document: &Path,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let failed = |error: &str| Error::Capture { error: error.to_owned() };
        let queue = self.queue().ok_or(Error::NotCommitted)?;
        let path = document.to_str().ok_or_else(|| failed("the document's path is no UTF-8"))?;
        self.synchronize()?;
        autoreleasepool(|_| {
            // SAFETY: the manager is the process's only one.
            let manager = unsafe { MTLCaptureManager::sharedCaptureManager() };
            let destination = MTLCaptureDestination::GPUTraceDocument;
            if !manager.supportsDestination(destination) {
                return Err(failed(
                    "the system allows none: METAL_CAPTURE_ENABLED=1 is not in the environment",
                ));
            }
            let descriptor = MTLCaptureDescriptor::new();
            // SAFETY: a queue is an object that can be captured.
            unsafe { descriptor.setCaptureObject(Some((**queue).as_ref())) };
            descriptor.setDestination(destination);
            descriptor.setOutputURL(Some(&NSURL::fileURLWithPath(&NSString::from_str(path))));
            let started = manager.startCaptureWithDescriptor_error(&descriptor);
            started.map_err(|error| failed(&error.localizedDescription().to_string()))
        })?;
        let _stopping = Stopping;
        let result = work()?;
        self.synchronize()?;
        Ok(result)
    }

    /// Encodes a launch over memories.
    ///
    /// # Safety
    /// As [`Recorder::encode`].
    unsafe fn dispatch(&self, dispatch: &Dispatch<'_>, memories: &[&Memory]) -> Result<(), Error> {
        let encode = |recorder: &mut Recorder, ticket: &Arc<Ticket>| {
            // SAFETY: the caller's contract.
            unsafe { recorder.encode(dispatch) };
            memories.iter().for_each(|memory| memory.used_by(ticket));
        };
        match &self.target {
            Target::Queue(queue) => queue.encode(encode),
            Target::Encoder(lent) => {
                let mut recorder = lent.recorder.lock().unwrap_or_else(PoisonError::into_inner);
                let recorder = recorder.as_mut().ok_or(Error::Ended)?;
                autoreleasepool(|_| encode(recorder, &lent.ticket));
                Ok(())
            }
        }
    }

    /// The bytes of the argument of a parameter.
    fn bytes(
        &self,
        kernel: &'static str,
        parameter: &'static str,
        memory: &Memory,
        span: Span,
    ) -> Result<Range<usize>, Error> {
        if !memory.is_of(&self.shared.device) {
            return Err(Error::OtherDevice { kernel, parameter });
        }
        let (size, bytes) = (span.element.bytes(), memory.bytes());
        let start = span.offset.saturating_mul(size);
        let end = span.offset.checked_add(span.len).and_then(|n| n.checked_mul(size));
        let at = memory.offset() + start.min(bytes);
        match end {
            // A binding starts inside of its buffer, also where it has no bytes.
            Some(_) if span.len == 0 && start <= bytes => Ok(0..0),
            Some(end) if end <= bytes && at.is_multiple_of(size) => Ok(at..memory.offset() + end),
            _ => Err(Error::Span { kernel, parameter, span, bytes }),
        }
    }

    /// Copies bytes to a memory after the launches before.
    fn write_after(&self, memory: &Memory, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let instance = write_bytes::instance();
        let (compiled, _) = self.shared.pipelines.get(&self.shared.device, &instance, &[])?;
        let Compiled { state, max_threads } = compiled;
        let (name, threads) = (instance.entry(), (max_threads / 32 * 32).clamp(32, 256));
        // Positions of threads are 32-bit.
        for (chunk, bytes) in bytes.chunks(MAX_WRITE).enumerate() {
            let staged = if bytes.len() <= MAX_BYTES { None } else { Some(self.staged(bytes)?) };
            let from = staged.as_ref().map_or(Binding::Bytes(bytes), |buffer| whole(buffer, bytes.len()));
            let to = memory.inside(at + chunk * MAX_WRITE, bytes.len());
            let (n, buffer) = (bytes.len() as u32, memory.buffer());
            let count = n.to_le_bytes();
            let dispatch = Dispatch {
                name: &name,
                pipeline: &state,
                bindings: vec![
                    from,
                    Binding::Buffer { buffer, bytes: to, writes: true },
                    Binding::Bytes(&count),
                ],
                groups: [n.div_ceil(threads), 1, 1],
                threads,
            };
            // SAFETY: the bindings are the parameters of `write_bytes`, with `n` bytes each, and every byte has a thread.
            unsafe { self.dispatch(&dispatch, &[memory]) }?;
        }
        Ok(())
    }

    /// A buffer that holds a copy of bytes.
    fn staged(&self, bytes: &[u8]) -> Result<Buffer, Error> {
        let device = &self.shared.device;
        // SAFETY: the bytes are copied.
        let buffer = unsafe {
            device.newBufferWithBytes_length_options(
                NonNull::from(bytes).cast(),
                bytes.len(),
                MTLResourceOptions::StorageModeShared,
            )
        };
        buffer.ok_or_else(|| Error::Memory { bytes: bytes.len(), max: device.maxBufferLength() })
    }
}

/// Stops a capture, also where the captured work panics.
struct Stopping;

impl Drop for Stopping {
    fn drop(&mut self) {
        // SAFETY: the manager is the process's only one.
        autoreleasepool(|_| unsafe { MTLCaptureManager::sharedCaptureManager() }.stopCapture());
    }
}

/// Ends the encoder of a device, also where the encoding work panics.
struct Ending<'a>(&'a Gpu);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if let Target::Encoder(lent) = &self.0.target {
            let recorder = lent.recorder.lock().unwrap_or_else(PoisonError::into_inner).take();
            recorder.into_iter().for_each(Recorder::end);
        }
    }
}

impl Target {
    fn queue(queue: CommandQueue, dispatch: DispatchType) -> Self {
        Self::Queue(Arc::new(Queue::new(queue, dispatch)))
    }
}

impl Shared {
    fn new(device: MetalDevice) -> Self {
        let limits = Limits {
            threads: u32::try_from(device.maxThreadsPerThreadgroup().width).unwrap_or(u32::MAX),
            shared_bytes: device.maxThreadgroupMemoryLength(),
            // Metal states no limit of a grid; positions are 32-bit.
            groups: [u32::MAX; 3],
        };
        let (name, pipelines) = (device.name().to_string(), Pipelines::new(&device));
        Self { device, name, limits, pipelines }
    }
}

impl Device for Gpu {
    type Memory = Memory;
    type Error = Error;

    fn limits(&self) -> Limits {
        self.shared.limits
    }

    fn submit(&self) {
        self.commit();
    }

    fn launch(&self, launch: Launch<'_, Memory>) -> Result<(), Error> {
        let instance = launch.instance();
        let kernel = instance.kernel();
        let (mut bindings, mut memories) = (Vec::new(), Vec::new());
        for (argument, parameter) in launch.arguments().iter().zip(kernel.parameters) {
            let (memory, span, writes) = match argument {
                Argument::Read(view) => (view.memory(), view.span(), false),
                Argument::Write(view) => (view.memory(), view.span(), true),
                Argument::Bytes(bytes) if bytes.len() > MAX_BYTES => {
                    return Err(Error::Bytes { kernel: kernel.name, bytes: bytes.len(), max: MAX_BYTES });
                }
                Argument::Bytes(bytes) => {
                    bindings.push(Binding::Bytes(bytes));
                    continue;
                }
                Argument::Constant(_) => continue,
            };
            let bytes = self.bytes(kernel.name, parameter.name, memory, span)?;
            bindings.push(Binding::Buffer { buffer: memory.buffer(), bytes, writes });
            memories.push(memory);
        }
        let constants: Vec<Constant> = launch.constants().collect();
        let (compiled, _) = self.shared.pipelines.get(&self.shared.device, instance, &constants)?;
        let (limit, threads) = (compiled.max_threads, launch.threads());
        if threads > limit {
            return Err(Error::ThreadLimit { kernel: kernel.name, limit, threads });
        }
        let name = instance.entry();
        let dispatch =
            Dispatch { name: &name, pipeline: &compiled.state, bindings, groups: launch.groups(), threads };
        // SAFETY: a launch holds an argument of the right kind and size for each parameter, in order, and the printed source declares the
        // same parameters, without constants, in the same order. Buffers are of this device and inside of their memory. That the kernel
        // stays inside of them is its contract's.
        unsafe { self.dispatch(&dispatch, &memories) }
    }

    fn thread_limit(error: &Error) -> Option<(&'static str, u32)> {
        match error {
            Error::ThreadLimit { kernel, limit, .. } => Some((*kernel, *limit)),
            _ => None,
        }
    }

    fn failures(&self) -> u64 {
        match &self.target {
            Target::Queue(queue) => queue.failures(),
            // Failures of the queue are counted when launches go to the queue again.
            Target::Encoder(lent) => lent.failures,
        }
    }
}

impl HostAccess for Gpu {
    fn zeroed(&self, element: ScalarType, len: usize) -> Result<Memory, Error> {
        let mut memory = Memory::uninit(&self.shared.device, element, len)?;
        // SAFETY: the memory is new.
        unsafe { memory.fill_zero() };
        Ok(memory)
    }

    fn uninit(&self, element: ScalarType, len: usize) -> Result<Memory, Error> {
        Memory::uninit(&self.shared.device, element, len)
    }

    fn write(&self, memory: &mut Memory, at: usize, bytes: &[u8]) -> Result<(), Error> {
        if bytes.is_empty() {
            return Ok(());
        }
        if let Target::Queue(queue) = &self.target {
            queue.poll();
        }
        if memory.is_idle() {
            // SAFETY: all command buffers that were given the memory have completed.
            unsafe { memory.write(at, bytes) };
            return Ok(());
        }
        self.write_after(memory, at, bytes)
    }

    /// [`Error::NotCommitted`] where launches go to an encoder of the caller's, or where a command buffer that uses the memory is not committed;
    /// [`Error::Execution`] where one failed.
    fn read(&self, memory: &Memory, at: usize, bytes: &mut [u8]) -> Result<(), Error> {
        self.synchronize()?;
        memory.take_failure()?;
        // SAFETY: all work on the queue has completed, and no other is known that uses the memory.
        unsafe { memory.read(at, bytes) };
        Ok(())
    }
}
