//! Launches in an encoder of compute commands, with barriers where one depends on another.

#![allow(unsafe_code)]

use super::object::{Buffer, ComputeEncoder, Pipeline, Shared};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLBarrierScope, MTLBuffer, MTLCommandEncoder, MTLComputeCommandEncoder, MTLComputePipelineState,
    MTLDispatchType, MTLSize,
};
use std::fmt;
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

/// An encoder of compute commands that another library wraps and orders. Launches reach it by that library's
/// functions, so that the library knows the memory that each launch reads and writes, as it knows the memory
/// of its own commands.
///
/// # Safety
/// - Every call is passed on, unchanged and in order, to one encoder of the device.
/// - A launch that uses a buffer that an earlier command writes, or writes a buffer that an earlier command
///   uses, starts when that command has ended; commands of the encoders before and after it are ordered so
///   too.
pub unsafe trait ForeignEncoder: fmt::Debug + Send {
    /// Sets the pipeline of the next launch.
    fn set_pipeline(&mut self, pipeline: &ProtocolObject<dyn MTLComputePipelineState>);

    /// Sets an argument of the next launch: a buffer from byte `offset` on, which the launch reads, and with `writes` also writes. It lies
    /// inside of the buffer.
    fn set_buffer(
        &mut self,
        index: usize,
        buffer: &ProtocolObject<dyn MTLBuffer>,
        offset: usize,
        writes: bool,
    );

    /// Sets an argument of the next launch: at most 4096 bytes, which are copied.
    fn set_bytes(&mut self, index: usize, bytes: &[u8]);

    /// Launches `groups` threadgroups of `threads` threads.
    fn dispatch(&mut self, groups: MTLSize, threads: MTLSize);
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

/// The encoder that launches are passed to.
#[derive(Debug)]
enum Encoder {
    Metal(Shared<ComputeEncoder>),
    Foreign(Box<dyn ForeignEncoder>),
}

/// An encoder of compute commands.
#[derive(Debug)]
pub(super) struct Recorder {
    encoder: Encoder,
    dispatch: DispatchType,
    /// Memory that launches since the last barrier use.
    used: Vec<Use>,
}

/// Bytes of a buffer that a launch uses. The buffer lives until the command buffer has completed, so that no other has its address.
#[derive(Debug)]
struct Use {
    buffer: usize,
    bytes: Range<usize>,
    writes: bool,
}

impl Use {
    /// Returns true if one of two launches has to wait for the other.
    fn orders(&self, other: &Self) -> bool {
        self.buffer == other.buffer
            && (self.writes || other.writes)
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

impl Recorder {
    pub(super) fn new(encoder: ComputeEncoder) -> Self {
        let is_concurrent = encoder.dispatchType() == MTLDispatchType::Concurrent;
        let dispatch = if is_concurrent { DispatchType::Concurrent } else { DispatchType::Serial };
        Self { encoder: Encoder::Metal(Shared::locked(encoder)), dispatch, used: Vec::new() }
    }

    /// Of an encoder that orders launches itself.
    pub(super) const fn foreign(encoder: Box<dyn ForeignEncoder>) -> Self {
        Self { encoder: Encoder::Foreign(encoder), dispatch: DispatchType::Serial, used: Vec::new() }
    }

    /// Encodes a launch.
    ///
    /// # Safety
    /// - The bindings are the parameters of the pipeline's kernel, in order and with the sizes that it expects.
    /// - The kernel stays inside of them, with as many threads.
    pub(super) unsafe fn encode(&mut self, dispatch: &Dispatch<'_>) {
        let [width, height, depth] = dispatch.groups.map(|n| n as usize);
        let groups = MTLSize { width, height, depth };
        let threads = MTLSize { width: dispatch.threads as usize, height: 1, depth: 1 };
        let before = match self.dispatch {
            DispatchType::Serial => false,
            DispatchType::Concurrent => self.follows(dispatch),
        };
        let encoder = match &mut self.encoder {
            Encoder::Metal(encoder) => &**encoder,
            Encoder::Foreign(encoder) => return pass_on(&mut **encoder, dispatch, groups, threads),
        };
        if before {
            encoder.memoryBarrierWithScope(MTLBarrierScope::Buffers);
        }
        encoder.pushDebugGroup(&NSString::from_str(dispatch.name));
        encoder.setComputePipelineState(dispatch.pipeline);
        for (index, binding) in dispatch.bindings.iter().enumerate() {
            // SAFETY: the index is a parameter's; the range starts inside of the buffer, which lives until the command buffer has completed, by
            // that or by the caller's contract of the encoder, and the bytes are copied.
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
        encoder.dispatchThreadgroups_threadsPerThreadgroup(groups, threads);
        encoder.popDebugGroup();
    }

    /// Notes the memory that a launch uses. Returns true if a barrier lies before it: it uses memory that
    /// another launch since the last barrier writes, or writes memory that one uses.
    fn follows(&mut self, dispatch: &Dispatch<'_>) -> bool {
        let uses: Vec<Use> = dispatch.bindings.iter().filter_map(Use::of).collect();
        let follows = self.used.iter().any(|before| uses.iter().any(|now| now.orders(before)));
        if follows {
            self.used.clear();
        }
        self.used.extend(uses);
        follows
    }

    /// Ends an encoder of Metal's; others are ended by whoever has them.
    pub(super) fn end(self) {
        if let Encoder::Metal(encoder) = self.encoder {
            encoder.endEncoding();
        }
    }
}

/// Passes a launch on to an encoder of another library's.
fn pass_on(encoder: &mut dyn ForeignEncoder, dispatch: &Dispatch<'_>, groups: MTLSize, threads: MTLSize) {
    encoder.set_pipeline(dispatch.pipeline);
    for (index, binding) in dispatch.bindings.iter().enumerate() {
        match binding {
            Binding::Buffer { buffer, bytes, writes } => {
                encoder.set_buffer(index, buffer, bytes.start, *writes);
            }
            Binding::Bytes(bytes) => encoder.set_bytes(index, bytes),
        }
    }
    encoder.dispatch(groups, threads);
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
