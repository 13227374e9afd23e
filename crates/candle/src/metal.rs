//! Tensors on Metal devices, read in place by launches in the encoder of candle's device.
//!
//! candle allocates buffers whose hazards Metal does not track, and gives one concurrent encoder to all of its kernels. Its
//! [`ComputeCommandEncoder`] is told of each buffer that a launch uses. It puts a barrier before a launch that uses what another writes,
//! and fences between encoders. flashtile's launches go through it, so it knows the buffers they use as it knows candle's own.

#![allow(unsafe_code, reason = "flashtile borrows buffers, and an encoder, of candle's")]

use crate::gpu::GpuStorage;
use crate::storage::refused;
use candle_core::metal_backend::DeviceId;
use candle_core::{Error, MetalDevice, MetalStorage, Result, Storage};
use candle_metal_kernels::metal::{Buffer, ComputeCommandEncoder, ComputePipeline};
use flashtile::gpu::PortableEngine;
use flashtile::metal::objc2::Message;
use flashtile::metal::objc2::runtime::ProtocolObject;
use flashtile::metal::objc2_metal::{MTLBuffer, MTLComputePipelineState, MTLSize};
use flashtile::metal::{Encode, ForeignEncoder, Gpu, Memory, Metal, ScalarType, Session};
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// Number of candle devices whose sessions are kept: more than a program uses at a time.
const MAX_DEVICES: usize = 4;

/// A session for each candle device, most recently used first. Threads share sessions: all encode into the device's one encoder, in order.
static SESSIONS: Mutex<Vec<(DeviceId, Session)>> = Mutex::new(Vec::new());

impl GpuStorage for MetalStorage {
    type Engine = PortableEngine<Gpu>;
    /// No guard is needed: candle's encoder orders launches by the buffers that it is told of.
    type Guard<'a> = ();

    fn with_session<T>(device: &MetalDevice, run: impl FnOnce(&mut Session, &Gpu) -> Result<T>) -> Result<T> {
        let mut sessions = SESSIONS.lock().unwrap_or_else(PoisonError::into_inner);
        let at = match sessions.iter().position(|(id, _)| *id == device.id()) {
            Some(at) => at,
            None => {
                let metal = Metal::with_device(device.metal_device().as_ref().retain()).map_err(refused)?;
                sessions.truncate(MAX_DEVICES - 1);
                sessions.push((device.id(), metal.session()));
                sessions.len() - 1
            }
        };
        sessions[..=at].rotate_right(1);
        let session = &mut sessions[0].1;
        let on = session.gpu().clone();
        run(session, &on)
    }

    fn launch(
        session: &mut Session,
        device: &MetalDevice,
        run: impl FnOnce(&mut Session) -> Result<()>,
    ) -> Result<()> {
        let commands = device.command_encoder()?;
        let encoder = Box::new(Encoder(commands.as_ref().clone()));
        // SAFETY: the encoder is candle's open one, which `commands` keeps from others, and candle's command buffers retain what they use.
        let encoded = unsafe { session.encode_in_foreign(encoder, |session| Ok(run(session))) };
        // Nothing else may encode until here.
        drop(commands);
        encoded.map_err(refused)?
    }

    fn lend(&self, on: &Gpu) -> Result<(Memory, ())> {
        let buffer: &ProtocolObject<dyn MTLBuffer> = self.buffer().as_ref();
        // SAFETY: the buffer is hazard-untracked, but candle's encoder is told of each launch and orders all work on the buffer; the CPU
        // writes to no buffer of a tensor.
        let memory = unsafe { on.borrow(buffer.retain(), 0, ScalarType::U8, buffer.length()) };
        Ok((memory.map_err(Error::msg)?, ()))
    }

    /// candle may have used the buffer for a tensor before: its encoder orders that work too.
    fn lend_mut(&mut self, on: &Gpu) -> Result<(Memory, ())> {
        self.lend(on)
    }

    fn into_storage(self) -> Storage {
        Storage::Metal(self)
    }
}

/// The encoder of candle's device.
struct Encoder(ComputeCommandEncoder);

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").finish_non_exhaustive()
    }
}

// SAFETY: candle lends its encoder under a lock, which is held while this value exists, so that one thread at a time uses it; counting
// references of Objective-C objects is atomic.
unsafe impl Send for Encoder {}

// SAFETY: every call is candle's own function for it, in order. candle's encoder puts a barrier before a launch that uses a buffer that an
// earlier launch writes, or writes one that an earlier launch uses; candle's device makes encoders wait for the fences of earlier ones.
unsafe impl ForeignEncoder for Encoder {
    fn set_pipeline(&mut self, pipeline: &ProtocolObject<dyn MTLComputePipelineState>) {
        self.0.set_compute_pipeline_state(&ComputePipeline::new(pipeline.retain()));
    }

    fn set_buffer(
        &mut self,
        index: usize,
        buffer: &ProtocolObject<dyn MTLBuffer>,
        offset: usize,
        writes: bool,
    ) {
        // candle knows a buffer by the address of Metal's object.
        let buffer = Buffer::new(buffer.retain());
        if writes {
            self.0.set_output_buffer(index, Some(&buffer), offset);
        } else {
            self.0.set_input_buffer(index, Some(&buffer), offset);
        }
    }

    fn set_bytes(&mut self, index: usize, bytes: &[u8]) {
        self.0.set_bytes_directly(index, bytes.len(), bytes.as_ptr().cast());
    }

    fn dispatch(&mut self, groups: MTLSize, threads: MTLSize) {
        self.0.dispatch_thread_groups(groups, threads);
    }
}
