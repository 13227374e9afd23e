//! Names of Metal's objects, and which of them threads may share.

#![allow(unsafe_code)]

use objc2::rc::{Retained, Weak};
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLBuffer, MTLCommandBuffer, MTLCommandQueue, MTLComputeCommandEncoder, MTLComputePipelineState,
    MTLDevice, MTLSharedEvent,
};
use std::ops::Deref;

/// A device, as Metal gives it.
pub type MetalDevice = Retained<ProtocolObject<dyn MTLDevice>>;

/// A queue of command buffers.
pub type CommandQueue = Retained<ProtocolObject<dyn MTLCommandQueue>>;

/// A command buffer.
pub type CommandBuffer = Retained<ProtocolObject<dyn MTLCommandBuffer>>;

/// An encoder of compute commands.
pub type ComputeEncoder = Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>;

/// Memory of a device.
pub type Buffer = Retained<ProtocolObject<dyn MTLBuffer>>;

/// An event that the CPU, and other queues and processes, can wait for and signal.
pub type SharedEvent = Retained<ProtocolObject<dyn MTLSharedEvent>>;

/// A compiled kernel.
pub(super) type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

/// An object that several threads may hold, and that is used by one at a time.
#[derive(Debug, Clone)]
pub(super) struct Shared<T>(T);

impl<T> Shared<T> {
    /// Of a buffer, whose methods that are called here, `length`, `contents` and `device`, read what never changes.
    pub(super) const fn buffer(buffer: T) -> Self
    where
        T: IsBuffer,
    {
        Self(buffer)
    }

    /// Of a command buffer or an encoder, which lie behind a lock.
    pub(super) const fn locked(object: T) -> Self
    where
        T: IsLocked,
    {
        Self(object)
    }
}

/// A buffer.
pub(super) trait IsBuffer {}
impl IsBuffer for Buffer {}

/// A command buffer or an encoder.
pub(super) trait IsLocked {}
impl IsLocked for CommandBuffer {}
impl IsLocked for ComputeEncoder {}
impl IsLocked for Weak<ProtocolObject<dyn MTLCommandBuffer>> {}

// SAFETY: counting references of Objective-C objects is atomic. Buffers are asked for what never changes. Command buffers and encoders are
// encoded into behind a lock; beside that, a command buffer is only asked for its status and error and waited for, which Metal allows on
// any thread, as its handlers run on one of its own.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}
