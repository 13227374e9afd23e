//! MTLComputePipelineDescriptor.

use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSArray, NSString};
use objc2_metal::{MTLBinaryArchive, MTLFunction, MTLShaderValidation, MTLSize};

use crate::object::settings;

settings! {
    /// Settings of a new pipeline.
    "MTLComputePipelineDescriptor" as PipelineDescriptor of PipelineSettings;
    values {
        threadGroupSizeIsMultipleOfThreadExecutionWidth/setThreadGroupSizeIsMultipleOfThreadExecutionWidth: bool = false;
        maxTotalThreadsPerThreadgroup/setMaxTotalThreadsPerThreadgroup: usize = 0;
        supportIndirectCommandBuffers/setSupportIndirectCommandBuffers: bool = false;
        maxCallStackDepth/setMaxCallStackDepth: usize = 1;
        shaderValidation/setShaderValidation: MTLShaderValidation = MTLShaderValidation::Default;
        requiredThreadsPerThreadgroup/setRequiredThreadsPerThreadgroup: MTLSize = MTLSize { width: 0, height: 0, depth: 0 };
    }
    objects {
        label/setLabel: NSString;
        computeFunction/setComputeFunction: ProtocolObject<dyn MTLFunction>;
        binaryArchives/setBinaryArchives: NSArray<ProtocolObject<dyn MTLBinaryArchive>>;
    }
    also {
        #[unsafe(method(reset))]
        fn reset(&self) {
            let ivars = objc2::DefinedClass::ivars(self);
            let fresh = PipelineSettings::default();
            ivars.threadGroupSizeIsMultipleOfThreadExecutionWidth.set(false);
            ivars.maxTotalThreadsPerThreadgroup.set(0);
            ivars.supportIndirectCommandBuffers.set(false);
            ivars.maxCallStackDepth.set(1);
            ivars.shaderValidation.set(MTLShaderValidation::Default);
            ivars.requiredThreadsPerThreadgroup.set(fresh.requiredThreadsPerThreadgroup.get());
            ivars.label.replace(None);
            ivars.computeFunction.replace(None);
            ivars.binaryArchives.replace(None);
        }
    }
}
