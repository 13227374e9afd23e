//! Descriptors of passes: where the times of an encoder go.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use objc2::rc::{Allocated, Retained};
use objc2::runtime::{NSObject, ProtocolObject};
use objc2::{ClassType, DefinedClass, define_class};
use objc2_metal::{MTLBlitPassDescriptor, MTLComputePassDescriptor, MTLCounterSampleBuffer, MTLDispatchType};

use crate::counters::{DONT_SAMPLE, SampleState, sample_state};
use crate::object::{initialized, object, ours, settings};

/// Where the times of an encoder go, at its start and at its end.
pub(crate) type Samples = Vec<(Arc<SampleState>, [usize; 2])>;

macro_rules! pass_classes {
    ($pass:ident $pass_name:literal, $list:ident $list_name:literal, $attachment:ident of $settings:ident $attachment_name:literal, $create:ident) => {
        settings! {
            /// A sample buffer, and where in it the times of an encoder go.
            $attachment_name as $attachment of $settings;
            values {
                startOfEncoderSampleIndex/setStartOfEncoderSampleIndex: usize = DONT_SAMPLE;
                endOfEncoderSampleIndex/setEndOfEncoderSampleIndex: usize = DONT_SAMPLE;
            }
            objects {
                sampleBuffer/setSampleBuffer: ProtocolObject<dyn MTLCounterSampleBuffer>;
            }
            also {}
        }

        define_class!(
            // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
            #[unsafe(super(NSObject))]
            #[name = $list_name]
            #[ivars = RefCell<BTreeMap<usize, Retained<$attachment>>>]
            pub(crate) struct $list;

            impl $list {
                #[unsafe(method_id(objectAtIndexedSubscript:))]
                fn at(&self, index: usize) -> Retained<$attachment> {
                    let mut all = self.ivars().borrow_mut();
                    all.entry(index).or_insert_with(|| object($settings::default())).clone()
                }

                #[unsafe(method(setObject:atIndexedSubscript:))]
                fn set(&self, attachment: Option<&$attachment>, index: usize) {
                    let mut all = self.ivars().borrow_mut();
                    match attachment {
                        Some(a) => all.insert(index, objc2::Message::retain(a)),
                        None => all.remove(&index),
                    };
                }
            }
        );

        /// Its attachments, and how dispatches are ordered.
        pub(crate) struct $pass {
            attachments: Retained<$list>,
            kind: std::cell::Cell<MTLDispatchType>,
        }

        impl Default for $pass {
            fn default() -> Self {
                let attachments = object(RefCell::default());
                Self { attachments, kind: std::cell::Cell::new(MTLDispatchType::Serial) }
            }
        }

        impl $pass {
            pub(crate) fn samples(&self) -> Samples {
                let all = self.attachments.ivars().borrow();
                let found = all.values().filter_map(|a| {
                    let a = a.ivars();
                    let state = sample_state(a.sampleBuffer.borrow().as_ref()?).clone();
                    let at = [a.startOfEncoderSampleIndex.get(), a.endOfEncoderSampleIndex.get()];
                    at.iter().for_each(|&i| state.check(i));
                    Some((state, at))
                });
                found.collect()
            }
        }

        define_class!(
            // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
            #[unsafe(super(NSObject))]
            #[name = $pass_name]
            #[ivars = $pass]
            pub(crate) struct $create;

            impl $create {
                #[unsafe(method_id(init))]
                fn init(this: Allocated<Self>) -> Retained<Self> {
                    initialized(this, $pass::default())
                }

                #[unsafe(method_id(sampleBufferAttachments))]
                fn attachments(&self) -> Retained<$list> {
                    self.ivars().attachments.clone()
                }

                #[unsafe(method(dispatchType))]
                fn kind(&self) -> MTLDispatchType {
                    self.ivars().kind.get()
                }

                #[unsafe(method(setDispatchType:))]
                fn set_kind(&self, kind: MTLDispatchType) {
                    self.ivars().kind.set(kind);
                }

                #[unsafe(method_id(computePassDescriptor))]
                fn compute_pass() -> Retained<Self> {
                    object($pass::default())
                }

                #[unsafe(method_id(blitPassDescriptor))]
                fn blit_pass() -> Retained<Self> {
                    object($pass::default())
                }
            }
        );
    };
}

pass_classes!(
    ComputePass "MTLComputePassDescriptor",
    ComputeAttachments "MTLComputePassSampleBufferAttachmentDescriptorArray",
    ComputeAttachment of ComputeAttachmentSettings "MTLComputePassSampleBufferAttachmentDescriptor",
    ComputePassDescriptor
);
pass_classes!(
    BlitPass "MTLBlitPassDescriptor",
    BlitAttachments "MTLBlitPassSampleBufferAttachmentDescriptorArray",
    BlitAttachment of BlitAttachmentSettings "MTLBlitPassSampleBufferAttachmentDescriptor",
    BlitPassDescriptor
);

/// The settings of a descriptor: true if dispatches are concurrent, and the places of times.
pub(crate) fn compute_pass(descriptor: &MTLComputePassDescriptor) -> (bool, Samples) {
    let pass = ours::<ComputePassDescriptor, _>(descriptor).ivars();
    (pass.kind.get() == MTLDispatchType::Concurrent, pass.samples())
}

/// Where the times of a blit encoder go.
pub(crate) fn blit_pass(descriptor: &MTLBlitPassDescriptor) -> Samples {
    ours::<BlitPassDescriptor, _>(descriptor).ivars().samples()
}

pub(crate) fn register() {
    let _ = (ComputePassDescriptor::class(), ComputeAttachments::class(), ComputeAttachment::class());
    let _ = (BlitPassDescriptor::class(), BlitAttachments::class(), BlitAttachment::class());
}
