//! The interface between tests and a device.

use std::sync::Arc;

use objc2::runtime::ProtocolObject;
use objc2_metal::{MTLCommandBufferError, MTLDevice};

use crate::device::machine_of;
use crate::machine::{Counters, Entry, Machine, lock};
use crate::profile::{Order, Timing};

/// The other side of a device: how it behaves, what it has done, and how it fails.
#[derive(Clone, Debug)]
pub struct Control(Arc<Machine>);

/// The control of a device.
///
/// # Panics
/// Where the device is none of this crate's.
pub fn control(device: &ProtocolObject<dyn MTLDevice>) -> Control {
    Control(machine_of(device).clone())
}

impl Control {
    /// When work runs; [`Timing::LATE`] unless a test says otherwise.
    pub fn set_timing(&self, timing: Timing) {
        lock(&self.0.behavior).timing = timing;
        self.0.ring();
    }

    /// In which order unordered work runs; [`Order::Encoded`] unless a test says otherwise.
    pub fn set_order(&self, order: Order) {
        if let Order::Random(seed) = order {
            self.0.seed(seed);
        }
        lock(&self.0.behavior).order = order;
    }

    /// Counts of the work that the device has done.
    pub fn counters(&self) -> Counters {
        self.0.counters()
    }

    /// Labels, debug groups, captures and commits.
    pub fn log(&self) -> Vec<Entry> {
        self.0.log()
    }

    /// Rules that work has broken which ran since the last call. Each is also the error of its command buffer.
    pub fn take_violations(&self) -> Vec<String> {
        self.0.take_violations()
    }

    /// Has the next compilation of a library fail with these messages.
    pub fn fail_library(&self, messages: &str) {
        lock(&self.0.faults).compilations.push_back(messages.into());
    }

    /// Has the next pipeline fail with this message.
    pub fn fail_pipeline(&self, message: &str) {
        lock(&self.0.faults).pipelines.push_back(message.into());
    }

    /// Has a buffer or a heap be nil, for want of memory, after `after` more that are made.
    pub fn fail_buffer(&self, after: usize) {
        lock(&self.0.faults).buffers.push_back(after);
    }

    /// Has the next command buffer that runs fail with this code, without running.
    pub fn fail_command_buffer(&self, code: MTLCommandBufferError) {
        lock(&self.0.faults).command_buffers.push_back((code, None));
    }

    /// Has the next command buffer that runs fail because of another one's fault, without running: its code is internal, and its
    /// description says that it is an innocent victim.
    pub fn fail_innocent_command_buffer(&self) {
        let text =
            "Innocent Victim of GPU Error/Recovery (00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)";
        lock(&self.0.faults).command_buffers.push_back((MTLCommandBufferError::Internal, Some(text)));
    }

    /// Has the next binary archive that is opened from a file be refused.
    pub fn refuse_archive(&self) {
        lock(&self.0.faults).archives += 1;
    }
}
