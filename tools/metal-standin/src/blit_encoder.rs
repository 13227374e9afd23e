//! Blit encoders.

use objc2::DefinedClass;
use objc2::rc::Retained;
use objc2::runtime::{NSObjectProtocol, ProtocolObject};
use objc2_foundation::NSRange;
use objc2_metal::{
    MTLBlitCommandEncoder, MTLBuffer, MTLCommandEncoder, MTLCounterSampleBuffer, MTLFence, MTLResource,
};

use crate::buffer::{Buffer, buffer_of};
use crate::commands::Step;
use crate::counters::sample_state;
use crate::encoder::{Encoding, encoder_class};
use crate::object::{Protocol, object, ours};
use crate::rules;

encoder_class! {
    BlitEncoder of Encoding, "StandinBlitCommandEncoder";

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLBlitCommandEncoder for BlitEncoder {
        #[unsafe(method(copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:))]
        fn copy(
            &self,
            from: &ProtocolObject<dyn MTLBuffer>,
            from_offset: usize,
            to: &ProtocolObject<dyn MTLBuffer>,
            to_offset: usize,
            size: usize,
        ) {
            rules::blit(from_offset, size, buffer_of(from).state());
            rules::blit(to_offset, size, buffer_of(to).state());
            if buffer_of(from).state().id == buffer_of(to).state().id {
                rules::blit_inside(from_offset, to_offset, size);
            }
            let from = self.encoding().used(from, from_offset..from_offset + size);
            let to = self.encoding().used(to, to_offset..to_offset + size);
            self.encoding().step(Step::Copy { from, to });
        }

        #[unsafe(method(fillBuffer:range:value:))]
        fn fill(&self, buffer: &ProtocolObject<dyn MTLBuffer>, range: NSRange, value: u8) {
            rules::blit(range.location, range.length, buffer_of(buffer).state());
            let to = self.encoding().used(buffer, range.location..range.end());
            self.encoding().step(Step::Fill { to, value });
        }

        /// "MTLBlitCommandEncoder, synchronize(resource:)": for managed storage; there is nothing to do where memory is unified.
        #[unsafe(method(synchronizeResource:))]
        fn synchronize(&self, resource: &ProtocolObject<dyn MTLResource>) {
            let buffer: &Buffer = ours(resource);
            rules::same_device(buffer.state().machine.id, self.encoding().commands.machine.id, "a resource");
            rules::managed(buffer.state(), "synchronizeResource");
            self.encoding().check();
        }

        #[unsafe(method(updateFence:))]
        fn update_fence(&self, fence: &ProtocolObject<dyn MTLFence>) {
            self.encoding().update_fence(fence);
        }

        #[unsafe(method(waitForFence:))]
        fn wait_for_fence(&self, fence: &ProtocolObject<dyn MTLFence>) {
            self.encoding().wait_for_fence(fence);
        }

        #[unsafe(method(sampleCountersInBuffer:atSampleIndex:withBarrier:))]
        fn sample(&self, _samples: &ProtocolObject<dyn MTLCounterSampleBuffer>, _index: usize, _barrier: bool) {
            rules::samples_dispatch();
        }

        #[unsafe(method(resolveCounters:inRange:destinationBuffer:destinationOffset:))]
        fn resolve(
            &self,
            samples: &ProtocolObject<dyn MTLCounterSampleBuffer>,
            range: NSRange,
            buffer: &ProtocolObject<dyn MTLBuffer>,
            offset: usize,
        ) {
            let samples = sample_state(samples).clone();
            rules::same_device(samples.machine.id, self.encoding().commands.machine.id, "a counter sample buffer");
            samples.check_range(range);
            let bytes = range.length * size_of::<u64>();
            rules::blit(offset, bytes, buffer_of(buffer).state());
            let to = self.encoding().used(buffer, offset..offset + bytes);
            self.encoding().step(Step::Resolve { samples, range: range.location..range.end(), to });
        }
    }
}

impl BlitEncoder {
    pub(crate) fn encoding(&self) -> &Encoding {
        self.ivars()
    }
}

/// An encoder.
pub(crate) fn new_encoder(encoding: Encoding) -> Protocol<dyn MTLBlitCommandEncoder> {
    let this: Retained<BlitEncoder> = object(encoding);
    ProtocolObject::from_retained(this)
}
