//! Helpers of the tests' host: a device with a queue, and short names for long calls of objc2-metal.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use flashtile_metal_standin::{Control, Profile, control, device};
use objc2::AnyThread;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::*;

pub(crate) type Object<T> = Retained<ProtocolObject<T>>;
pub(crate) type Encoder = ProtocolObject<dyn MTLComputeCommandEncoder>;
pub(crate) type Commands = ProtocolObject<dyn MTLCommandBuffer>;
pub(crate) type Buffer = ProtocolObject<dyn MTLBuffer>;

/// Kernels of the tests: `put` writes a value, `copy` copies, `add` reads two buffers, `sum` uses threadgroup memory.
pub(crate) const TEXT: &str = "#include <metal_stdlib>
using namespace metal;
constant uint COUNT [[function_constant(0)]];
kernel void put(device uint* x [[buffer(0)]], constant uint& v [[buffer(1)]], uint i [[thread_position_in_grid]]) { x[i] = v; }
kernel void copy(device const uint* x [[buffer(0)]], device uint* y [[buffer(1)]], uint i [[thread_position_in_grid]]) { y[i] = x[i]; }
kernel void add(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]], device float* c [[buffer(2)]],
                constant float& scale [[buffer(3)]], uint i [[thread_position_in_grid]]) {
    if (i < COUNT) { c[i] = (a[i] + b[i]) * scale; }
}
kernel void sum(device const float* a [[buffer(0)]], device float* c [[buffer(1)]], threadgroup float* t [[threadgroup(0)]],
                uint i [[thread_index_in_threadgroup]]) {
    t[i] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 0) { float s = 0.0f; for (uint k = 0; k < 64; ++k) { s += t[k]; } c[0] = s; }
}
kernel void limited [[max_total_threads_per_threadgroup(64)]] (device uint* x [[buffer(0)]]) { x[0] = 1u; }
kernel void wild(device uint* x [[buffer(0)]], uint i [[thread_position_in_grid]]) { x[i + 100000u] = 1u; }
";

/// A device, its queue, and the pipelines of [`TEXT`].
pub(crate) struct Host {
    pub(crate) device: Object<dyn MTLDevice>,
    pub(crate) queue: Object<dyn MTLCommandQueue>,
    pub(crate) control: Control,
}

pub(crate) fn options() -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    options
}

/// The panic's text of what a host must not do.
pub(crate) fn refused(f: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| autoreleasepool(|_| f()))).expect_err("a panic");
    panic
        .downcast_ref::<String>()
        .cloned()
        .unwrap_or_else(|| panic.downcast_ref::<&str>().unwrap().to_string())
}

/// Asserts that a text says something.
#[track_caller]
pub(crate) fn says(text: &str, what: &str) {
    assert!(text.contains(what), "{text:?} does not say {what:?}");
}

pub(crate) fn size(width: usize) -> MTLSize {
    MTLSize { width, height: 1, depth: 1 }
}

pub(crate) fn string(text: &str) -> Retained<NSString> {
    NSString::from_str(text)
}

impl Host {
    pub(crate) fn new() -> Self {
        Self::with(Profile::default())
    }

    pub(crate) fn with(profile: Profile) -> Self {
        let device = device(profile);
        let queue = device.newCommandQueue().unwrap();
        let control = control(&device);
        Self { device, queue, control }
    }

    pub(crate) fn library(&self, source: &str) -> Result<Object<dyn MTLLibrary>, String> {
        self.device
            .newLibraryWithSource_options_error(&string(source), Some(&options()))
            .map_err(|e| format!("{} {}: {}", e.domain(), e.code(), e.localizedDescription()))
    }

    /// A kernel of [`TEXT`], COUNT set.
    pub(crate) fn function(&self, name: &str, count: u32) -> Object<dyn MTLFunction> {
        let values = MTLFunctionConstantValues::init(MTLFunctionConstantValues::alloc());
        unsafe { values.setConstantValue_type_atIndex(NonNull::from(&count).cast(), MTLDataType::UInt, 0) };
        self.library(TEXT).unwrap().newFunctionWithName_constantValues_error(&string(name), &values).unwrap()
    }

    pub(crate) fn pipeline(&self, name: &str) -> Object<dyn MTLComputePipelineState> {
        autoreleasepool(|_| {
            self.device.newComputePipelineStateWithFunction_error(&self.function(name, 64)).unwrap()
        })
    }

    pub(crate) fn buffer<T: Copy>(&self, of: &[T]) -> Object<dyn MTLBuffer> {
        self.buffer_with(of, MTLResourceOptions::StorageModeShared)
    }

    pub(crate) fn buffer_with<T: Copy>(
        &self,
        of: &[T],
        options: MTLResourceOptions,
    ) -> Object<dyn MTLBuffer> {
        let at = NonNull::from(of).cast::<c_void>();
        unsafe { self.device.newBufferWithBytes_length_options(at, size_of_val(of), options) }.unwrap()
    }

    pub(crate) fn zeros(&self, bytes: usize) -> Object<dyn MTLBuffer> {
        self.device.newBufferWithLength_options(bytes, MTLResourceOptions::StorageModeShared).unwrap()
    }

    pub(crate) fn untracked(&self, bytes: usize) -> Object<dyn MTLBuffer> {
        let options = MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        self.device.newBufferWithLength_options(bytes, options).unwrap()
    }

    pub(crate) fn commands(&self) -> Object<dyn MTLCommandBuffer> {
        self.queue.commandBuffer().unwrap()
    }

    /// Encodes `put` of a value into 64 words of a buffer from a byte on.
    pub(crate) fn put(&self, encoder: &Encoder, buffer: &Buffer, offset: usize, value: u32) {
        encoder.setComputePipelineState(&self.pipeline("put"));
        unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), offset, 0) };
        set(encoder, &value, 1);
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(64));
    }

    /// Encodes a copy of 64 words.
    pub(crate) fn copy(&self, encoder: &Encoder, from: &Buffer, to: &Buffer) {
        encoder.setComputePipelineState(&self.pipeline("copy"));
        bind(encoder, &[from, to]);
        encoder.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(64));
    }

    /// Runs what a closure encodes in one serial encoder; the error of the command buffer.
    pub(crate) fn run(&self, f: impl FnOnce(&Encoder)) -> Result<(), String> {
        self.run_as(MTLDispatchType::Serial, f)
    }

    pub(crate) fn run_as(&self, kind: MTLDispatchType, f: impl FnOnce(&Encoder)) -> Result<(), String> {
        autoreleasepool(|_| {
            let commands = self.commands();
            let encoder = commands.computeCommandEncoderWithDispatchType(kind).unwrap();
            f(&encoder);
            encoder.endEncoding();
            finish(&commands)
        })
    }
}

/// Encodes with a serial encoder of a command buffer.
pub(crate) fn encode(commands: &Commands, f: impl FnOnce(&Encoder)) {
    let encoder = commands.computeCommandEncoder().unwrap();
    f(&encoder);
    encoder.endEncoding();
}

/// Commits, waits, and says how it went.
pub(crate) fn finish(commands: &Commands) -> Result<(), String> {
    commands.commit();
    wait(commands)
}

pub(crate) fn wait(commands: &Commands) -> Result<(), String> {
    commands.waitUntilCompleted();
    match commands.error() {
        Some(e) => Err(e.localizedDescription().to_string()),
        None => Ok(()),
    }
}

pub(crate) fn set<T: Copy>(encoder: &Encoder, value: &T, index: usize) {
    unsafe { encoder.setBytes_length_atIndex(NonNull::from(value).cast(), size_of::<T>(), index) };
}

pub(crate) fn bind(encoder: &Encoder, buffers: &[&Buffer]) {
    for (i, buffer) in buffers.iter().enumerate() {
        unsafe { encoder.setBuffer_offset_atIndex(Some(buffer), 0, i) };
    }
}

pub(crate) fn read<T: Copy>(buffer: &Buffer) -> Vec<T> {
    let count = buffer.length() / size_of::<T>();
    unsafe { std::slice::from_raw_parts(buffer.contents().as_ptr().cast::<T>(), count) }.to_vec()
}

/// Writes to a buffer as the CPU does.
pub(crate) fn write<T: Copy>(buffer: &Buffer, at: usize, value: T) {
    unsafe { buffer.contents().as_ptr().byte_add(at).cast::<T>().write_volatile(value) };
}

/// A file of this process's own.
pub(crate) fn file(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("flashtile-metal-{}-{name}", std::process::id()))
}
