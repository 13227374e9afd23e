//! Classes that the bindings link to, which are there before `main`.
#![allow(non_upper_case_globals, reason = "symbols of Apple's")]

use objc2::ClassType;

use crate::{
    archive, buffer, capture, command_buffer, constants, counters, foundation, heap, library, passes,
};
use crate::{pipeline, pipeline_descriptor, queue, residency, sync};

flashtile_objc_standin::export_classes! {
    NSArray = "._OBJC_CLASS_NSArray";
    NSAutoreleasePool = "._OBJC_CLASS_NSAutoreleasePool";
    NSData = "._OBJC_CLASS_NSData";
    NSDictionary = "._OBJC_CLASS_NSDictionary";
    NSEnumerator = "._OBJC_CLASS_NSEnumerator";
    NSError = "._OBJC_CLASS_NSError";
    NSNumber = "._OBJC_CLASS_NSNumber";
    NSProcessInfo = "._OBJC_CLASS_NSProcessInfo";
    NSString = "._OBJC_CLASS_NSString";
    NSURL = "._OBJC_CLASS_NSURL";
    MTLArchitecture = "._OBJC_CLASS_MTLArchitecture";
    MTLBinaryArchiveDescriptor = "._OBJC_CLASS_MTLBinaryArchiveDescriptor";
    MTLBlitPassDescriptor = "._OBJC_CLASS_MTLBlitPassDescriptor";
    MTLBlitPassSampleBufferAttachmentDescriptor = "._OBJC_CLASS_MTLBlitPassSampleBufferAttachmentDescriptor";
    MTLBlitPassSampleBufferAttachmentDescriptorArray = "._OBJC_CLASS_MTLBlitPassSampleBufferAttachmentDescriptorArray";
    MTLCaptureDescriptor = "._OBJC_CLASS_MTLCaptureDescriptor";
    MTLCaptureManager = "._OBJC_CLASS_MTLCaptureManager";
    MTLCommandBufferDescriptor = "._OBJC_CLASS_MTLCommandBufferDescriptor";
    MTLCommandQueueDescriptor = "._OBJC_CLASS_MTLCommandQueueDescriptor";
    MTLCompileOptions = "._OBJC_CLASS_MTLCompileOptions";
    MTLComputePassDescriptor = "._OBJC_CLASS_MTLComputePassDescriptor";
    MTLComputePassSampleBufferAttachmentDescriptor = "._OBJC_CLASS_MTLComputePassSampleBufferAttachmentDescriptor";
    MTLComputePassSampleBufferAttachmentDescriptorArray = "._OBJC_CLASS_MTLComputePassSampleBufferAttachmentDescriptorArray";
    MTLComputePipelineDescriptor = "._OBJC_CLASS_MTLComputePipelineDescriptor";
    MTLComputePipelineReflection = "._OBJC_CLASS_MTLComputePipelineReflection";
    MTLCounterSampleBufferDescriptor = "._OBJC_CLASS_MTLCounterSampleBufferDescriptor";
    MTLFunctionDescriptor = "._OBJC_CLASS_MTLFunctionDescriptor";
    MTLFunctionConstant = "._OBJC_CLASS_MTLFunctionConstant";
    MTLFunctionConstantValues = "._OBJC_CLASS_MTLFunctionConstantValues";
    MTLHeapDescriptor = "._OBJC_CLASS_MTLHeapDescriptor";
    MTLResidencySetDescriptor = "._OBJC_CLASS_MTLResidencySetDescriptor";
    MTLSharedEventHandle = "._OBJC_CLASS_MTLSharedEventHandle";
    MTLSharedEventListener = "._OBJC_CLASS_MTLSharedEventListener";
}

extern "C" fn start() {
    export_classes();
    foundation::register();
    let _ = (
        library::Options::class(),
        library::Constant::class(),
        library::FunctionDescriptor::class(),
        constants::Constants::class(),
    );
    let _ = (pipeline_descriptor::PipelineDescriptor::class(), pipeline::Reflection::class());
    let _ = (archive::ArchiveDescriptor::class(), heap::HeapDescriptor::class(), buffer::Buffer::class());
    let _ = (residency::ResidencySetDescriptor::class(), sync::Listener::class(), sync::Handle::class());
    let _ = (queue::QueueDescriptor::class(), crate::device::Architecture::class());
    passes::register();
    counters::register();
    command_buffer::register();
    capture::register();
}

/// The entry that makes the linker keep the classes, so that they exist before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
pub(crate) static AT_START: extern "C" fn() = start;
