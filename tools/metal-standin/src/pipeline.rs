//! Compute pipelines and their reflection.

use std::sync::Arc;

use flashtile_msl_standin::{AddressSpace, ArgumentInfo, Kernel};
use objc2::rc::Retained;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{DefinedClass, define_class};
use objc2_foundation::{NSArray, NSError, NSString};
use objc2_metal::{
    MTLAllocation, MTLBinding, MTLBindingAccess, MTLBindingType, MTLBufferBinding,
    MTLComputePipelineReflection, MTLComputePipelineState, MTLDataType, MTLPipelineOption, MTLSize,
    MTLThreadgroupBinding,
};

use crate::archive::has;
use crate::foundation::{array, error};
use crate::library::{Device, FunctionState, function_state};
use crate::machine::{Machine, invalid, lock};
use crate::object::{Protocol, object, ours, thread_safe};
use crate::pipeline_descriptor::PipelineSettings;
use crate::rules;

/// The domain of errors that the driver reports.
const DOMAIN: &str = "AGXMetalDomain";

/// A kernel as dispatches run it.
pub(crate) struct PipelineState {
    pub(crate) machine: Arc<Machine>,
    device: Device,
    pub(crate) name: String,
    pub(crate) kernel: Kernel,
    pub(crate) arguments: Vec<ArgumentInfo>,
    pub(crate) threads: usize,
    pub(crate) is_multiple_of_width: bool,
    pub(crate) required_threads: MTLSize,
    label: Option<String>,
    has_reflection: bool,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinComputePipelineState"]
    #[ivars = Arc<PipelineState>]
    pub(crate) struct Pipeline;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Pipeline {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLAllocation for Pipeline {
        #[unsafe(method(allocatedSize))]
        fn allocated_size(&self) -> usize {
            0
        }
    }

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLComputePipelineState for Pipeline {
        #[unsafe(method_id(label))]
        fn label(&self) -> Option<Retained<NSString>> {
            self.ivars().label.as_deref().map(NSString::from_str)
        }

        #[unsafe(method_id(device))]
        fn device(&self) -> Device {
            self.ivars().device.clone()
        }

        #[unsafe(method(maxTotalThreadsPerThreadgroup))]
        fn max_threads(&self) -> usize {
            self.ivars().threads
        }

        #[unsafe(method(threadExecutionWidth))]
        fn width(&self) -> usize {
            32
        }

        #[unsafe(method(staticThreadgroupMemoryLength))]
        fn static_memory(&self) -> usize {
            self.ivars().kernel.static_threadgroup_bytes()
        }

        #[unsafe(method(supportIndirectCommandBuffers))]
        fn supports_indirect(&self) -> bool {
            false
        }

        #[unsafe(method(requiredThreadsPerThreadgroup))]
        fn required_threads(&self) -> MTLSize {
            self.ivars().required_threads
        }

        #[unsafe(method_id(reflection))]
        fn reflection(&self) -> Option<Retained<MTLComputePipelineReflection>> {
            self.ivars().has_reflection.then(|| reflection(self.ivars()))
        }
    }
);

pub(crate) struct BindingIvars {
    name: String,
    index: usize,
    kind: MTLBindingType,
    access: MTLBindingAccess,
    bytes: usize,
}

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "StandinBinding"]
    #[ivars = BindingIvars]
    pub(crate) struct Binding;

    // SAFETY: the protocol asks nothing more.
    unsafe impl NSObjectProtocol for Binding {}

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLBinding for Binding {
        #[unsafe(method_id(name))]
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(&self.ivars().name)
        }

        #[unsafe(method(type))]
        fn kind(&self) -> MTLBindingType {
            self.ivars().kind
        }

        #[unsafe(method(access))]
        fn access(&self) -> MTLBindingAccess {
            self.ivars().access
        }

        #[unsafe(method(index))]
        fn index(&self) -> usize {
            self.ivars().index
        }

        #[unsafe(method(isUsed))]
        fn is_used(&self) -> bool {
            true
        }

        #[unsafe(method(isArgument))]
        fn is_argument(&self) -> bool {
            true
        }
    }

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLBufferBinding for Binding {
        #[unsafe(method(bufferDataSize))]
        fn data_size(&self) -> usize {
            self.ivars().bytes
        }

        #[unsafe(method(bufferDataType))]
        fn data_type(&self) -> MTLDataType {
            MTLDataType::None
        }
    }

    // SAFETY: methods have the types of the protocol's.
    unsafe impl MTLThreadgroupBinding for Binding {
        #[unsafe(method(threadgroupMemoryDataSize))]
        fn memory_size(&self) -> usize {
            self.ivars().bytes
        }
    }
);

define_class!(
    // SAFETY: NSObject asks nothing of its subclasses, and the class has no `Drop`.
    #[unsafe(super(NSObject))]
    #[name = "MTLComputePipelineReflection"]
    #[ivars = Arc<PipelineState>]
    pub(crate) struct Reflection;

    impl Reflection {
        #[unsafe(method_id(bindings))]
        fn bindings(&self) -> Retained<NSArray<ProtocolObject<dyn MTLBinding>>> {
            let bindings = self.ivars().arguments.iter().map(|a| {
                let is_read = a.is_const;
                let binding: Retained<Binding> = object(BindingIvars {
                    name: a.name.clone(),
                    index: a.index,
                    kind: match a.address_space {
                        AddressSpace::Device | AddressSpace::Constant => MTLBindingType::Buffer,
                        AddressSpace::Threadgroup => MTLBindingType::ThreadgroupMemory,
                    },
                    access: if is_read { MTLBindingAccess::ReadOnly } else { MTLBindingAccess::ReadWrite },
                    bytes: a.bytes.unwrap_or(0),
                });
                ProtocolObject::from_retained(binding)
            });
            array(bindings.collect())
        }
    }
);

thread_safe!(Pipeline, Binding, Reflection);

/// The reflection of a pipeline.
pub(crate) fn reflection(state: &Arc<PipelineState>) -> Retained<MTLComputePipelineReflection> {
    let this: Retained<Reflection> = object(state.clone());
    // SAFETY: the class is MTLComputePipelineReflection.
    unsafe { Retained::cast_unchecked(this) }
}

/// The state behind a pipeline.
pub(crate) fn pipeline_state(pipeline: &ProtocolObject<dyn MTLComputePipelineState>) -> &Arc<PipelineState> {
    ours::<Pipeline, _>(pipeline).ivars()
}

/// A pipeline of a function.
pub(crate) fn of_function(
    machine: &Arc<Machine>,
    device: Device,
    function: &FunctionState,
    options: MTLPipelineOption,
) -> Result<Protocol<dyn MTLComputePipelineState>, Retained<NSError>> {
    make(machine, device, function, &PipelineSettings::default(), options)
}

/// A pipeline of a descriptor.
pub(crate) fn of_descriptor(
    machine: &Arc<Machine>,
    device: Device,
    settings: &PipelineSettings,
    options: MTLPipelineOption,
) -> Result<Protocol<dyn MTLComputePipelineState>, Retained<NSError>> {
    let Some(function) = settings.computeFunction.borrow().clone() else {
        invalid!("a compute pipeline descriptor without computeFunction");
    };
    make(machine, device, &function_state(&function), settings, options)
}

fn make(
    machine: &Arc<Machine>,
    device: Device,
    function: &FunctionState,
    settings: &PipelineSettings,
    options: MTLPipelineOption,
) -> Result<Protocol<dyn MTLComputePipelineState>, Retained<NSError>> {
    let refused = |code: isize, text: &str| error(DOMAIN, code, text, Vec::new());
    rules::same_device(function.library.machine.id, machine.id, "a function");
    let kernel = function.kernel().map_err(|text| refused(2, &text))?;
    let key = function.key();
    if settings.binaryArchives.borrow().as_ref().is_some_and(|a| has(a, &key, machine)) {
        machine.count(|c| c.archive_hits += 1);
    } else if options.contains(MTLPipelineOption::FailOnBinaryArchiveMiss) {
        // "MTLPipelineOption, failOnBinaryArchiveMiss": no pipeline where the archives do not have it.
        return Err(refused(1, "the binary archives do not have this pipeline"));
    } else {
        machine.count(|c| c.pipelines += 1);
    }
    if let Some(text) = lock(&machine.faults).pipelines.pop_front() {
        return Err(refused(3, &text));
    }
    let limit = match settings.maxTotalThreadsPerThreadgroup.get() {
        0 => usize::MAX,
        n => n,
    };
    if limit != usize::MAX && limit > machine.profile.max_threads {
        invalid!(
            "maxTotalThreadsPerThreadgroup {limit} of a descriptor, at most {}",
            machine.profile.max_threads
        );
    }
    // A kernel or a descriptor that names a limit is compiled for it: registers are spilled to memory where they do not suffice.
    let threads = match (kernel.max_threads() as usize).min(limit) {
        n if n < machine.profile.max_threads && machine.profile.compiles_for_declared_threads => n,
        n => n.min(machine.profile.pipeline_threads),
    };
    let state = PipelineState {
        machine: machine.clone(),
        device,
        name: function.name.clone(),
        arguments: kernel.arguments(),
        kernel,
        threads,
        is_multiple_of_width: settings.threadGroupSizeIsMultipleOfThreadExecutionWidth.get(),
        required_threads: settings.requiredThreadsPerThreadgroup.get(),
        label: settings.label.borrow().as_ref().map(ToString::to_string),
        has_reflection: options.contains(MTLPipelineOption::BindingInfo),
    };
    let this: Retained<Pipeline> = object(Arc::new(state));
    Ok(ProtocolObject::from_retained(this))
}
