//! Launches in an encoder of compute commands, with barriers where one depends on another.

#![allow(unsafe_code)]

use super::object::{Buffer, ComputeEncoder, Pipeline, Shared};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::MTLBuffer;
use objc2_metal::{MTLBarrierScope, MTLCommandEncoder, MTLComputeCommandEncoder, MTLDispatchType, MTLSize};
use std::ops::Range;
use std::ptr::NonNull;

/// How launches of one encoder follow each other: `MTLDispatchType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::exhaustive_enums)]
pub enum DispatchType {
    /// A launch starts when the one before it has ended.
    #[default]
    Serial,
    /// Launches run at the same time, except where one uses memory that another before it writes: a memory barrier lies between.
    Concurrent,
}

impl From<DispatchType> for MTLDispatchType {
    fn from(of: DispatchType) -> Self {
        match of {
            DispatchType::Serial => Self::Serial,
            DispatchType::Concurrent => Self::Concurrent,
        }
    }
}

/// An argument of a launch.
#[derive(Debug)]
pub(super) enum Binding<'a> {
    /// A range of bytes of a buffer.
    Buffer { buffer: &'a ProtocolObject<dyn MTLBuffer>, bytes: Range<usize>, writes: bool },
    /// At most [`MAX_BYTES`] bytes, which the command buffer keeps.
    Bytes(&'a [u8]),
}

/// The most bytes of `setBytes` (Apple, `MTLComputeCommandEncoder`, `setBytes(_:length:index:)`).
pub(super) const MAX_BYTES: usize = 4096;

/// A launch: a pipeline, its arguments in order, and its threads.
#[derive(Debug)]
pub(super) struct Dispatch<'a> {
    pub(super) name: &'a str,
    pub(super) pipeline: &'a Pipeline,
    pub(super) bindings: Vec<Binding<'a>>,
    pub(super) groups: [u32; 3],
    pub(super) threads: u32,
}

/// An encoder of compute commands.
#[derive(Debug)]
pub(super) struct Recorder {
    encoder: Shared<ComputeEncoder>,
    dispatch: DispatchType,
    /// What launches since the last barrier use.
    used: Vec<Use>,
}

/// Bytes of a buffer that a launch uses. The encoder keeps the buffer, so that no other has its address.
#[derive(Debug)]
struct Use {
    buffer: usize,
    bytes: Range<usize>,
    writes: bool,
}

impl Use {
    /// Whether one of two launches has to wait for the other.
    fn orders(&self, other: &Self) -> bool {
        self.buffer == other.buffer
            && (self.writes || other.writes)
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

impl Recorder {
    pub(super) const fn new(encoder: ComputeEncoder, dispatch: DispatchType) -> Self {
        Self { encoder: Shared::locked(encoder), dispatch, used: Vec::new() }
    }

    /// Encodes a launch.
    ///
    /// # Safety
    /// - The bindings are the parameters of the pipeline's kernel, in order and with the sizes that it expects.
    /// - The kernel stays inside of them, with as many threads.
    pub(super) unsafe fn encode(&mut self, dispatch: &Dispatch<'_>) {
        if self.dispatch == DispatchType::Concurrent {
            self.order(dispatch);
        }
        let encoder = &**self.encoder;
        encoder.pushDebugGroup(&NSString::from_str(dispatch.name));
        encoder.setComputePipelineState(dispatch.pipeline);
        for (index, binding) in dispatch.bindings.iter().enumerate() {
            // SAFETY: the index is a parameter's; the range starts inside of the buffer, which the command buffer keeps, and the bytes are
            // copied.
            unsafe {
                match binding {
                    Binding::Buffer { buffer, bytes, .. } => {
                        encoder.setBuffer_offset_atIndex(Some(buffer), bytes.start, index);
                    }
                    Binding::Bytes(bytes) => {
                        let start = NonNull::from(*bytes).cast();
                        encoder.setBytes_length_atIndex(start, bytes.len(), index);
                    }
                }
            }
        }
        let [width, height, depth] = dispatch.groups.map(|n| n as usize);
        let threads = MTLSize { width: dispatch.threads as usize, height: 1, depth: 1 };
        encoder.dispatchThreadgroups_threadsPerThreadgroup(MTLSize { width, height, depth }, threads);
        encoder.popDebugGroup();
    }

    /// Encodes a barrier where a launch uses what another since the last barrier writes, or writes what that one uses.
    fn order(&mut self, dispatch: &Dispatch<'_>) {
        let uses: Vec<Use> = dispatch.bindings.iter().filter_map(Use::of).collect();
        if self.used.iter().any(|before| uses.iter().any(|now| now.orders(before))) {
            self.encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
            self.used.clear();
        }
        self.used.extend(uses);
    }

    pub(super) fn end(self) {
        self.encoder.endEncoding();
    }
}

impl Use {
    fn of(binding: &Binding<'_>) -> Option<Self> {
        match binding {
            Binding::Buffer { buffer, bytes, writes } => {
                let buffer = std::ptr::from_ref(*buffer).cast::<()>().addr();
                Some(Self { buffer, bytes: bytes.clone(), writes: *writes })
            }
            Binding::Bytes(_) => None,
        }
    }
}

/// A buffer that nothing but one launch reads.
pub(super) fn whole(buffer: &Buffer, bytes: usize) -> Binding<'_> {
    Binding::Buffer { buffer, bytes: 0..bytes, writes: false }
}
