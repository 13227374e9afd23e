//! From an instance of a kernel to a pipeline: compiled once, kept in memory and in a binary archive.

#![allow(unsafe_code)]

use super::archive::{Archives, refer};
use super::error::Error;
use super::object::{MetalDevice, Pipeline};
use crate::device::Constant;
use crate::scalar::ScalarType;
use crate::source::{Generic, Instance, Target};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::NSObjectProtocol;
use objc2::sel;
use objc2_foundation::NSString;
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineDescriptor, MTLComputePipelineState, MTLDataType, MTLDevice,
    MTLFunctionConstantValues, MTLLanguageVersion, MTLLibrary, MTLMathFloatingPointFunctions, MTLMathMode,
    MTLPipelineOption,
};
use std::collections::HashMap;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// An instance of a kernel with its constants, on the device.
#[derive(Debug, Clone)]
pub(super) struct Compiled {
    pub(super) state: Pipeline,
    /// `maxTotalThreadsPerThreadgroup`, which falls as registers grow on devices of the families Apple7 and Apple8.
    pub(super) max_threads: u32,
}

/// The key of a pipeline: the address of the kernel, which is a static, generics and constants.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Key {
    kernel: usize,
    generics: Vec<Generic>,
    constants: Vec<Constant>,
}

/// A pipeline, if it is compiled. Whoever compiles it holds the lock, so that nobody else does too.
type Slot = Arc<Mutex<Option<Compiled>>>;

/// The pipelines of a device.
#[derive(Debug)]
pub(super) struct Pipelines {
    archives: Archives,
    slots: Mutex<HashMap<Key, Slot>>,
}

impl Pipelines {
    pub(super) fn new(device: &MetalDevice) -> Self {
        Self { archives: Archives::new(device), slots: Mutex::default() }
    }

    pub(super) fn folder(&self) -> Option<&Path> {
        self.archives.folder()
    }

    pub(super) const fn archives(&self) -> &Archives {
        &self.archives
    }

    /// The pipeline of an instance, and whether it was kept on disk, which running does not need.
    pub(super) fn get(
        &self,
        device: &MetalDevice,
        instance: &Instance,
        constants: &[Constant],
    ) -> Result<(Compiled, Result<(), Error>), Error> {
        let kernel = std::ptr::from_ref(instance.kernel()).addr();
        let key = Key { kernel, generics: instance.generics().to_vec(), constants: constants.to_vec() };
        let slot = {
            let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(slots.entry(key).or_default())
        };
        // Other pipelines may be compiled meanwhile.
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(compiled) = &*slot {
            return Ok((compiled.clone(), Ok(())));
        }
        let (compiled, kept) = autoreleasepool(|_| self.compile(device, instance, constants))?;
        Ok((slot.insert(compiled).clone(), kept))
    }

    fn compile(
        &self,
        device: &MetalDevice,
        instance: &Instance,
        constants: &[Constant],
    ) -> Result<(Compiled, Result<(), Error>), Error> {
        let (entry, source) = (instance.entry(), instance.source(Target::Metal));
        let descriptor = describe(device, &entry, &source, constants)?;
        let make = |option| {
            let made = device.newComputePipelineStateWithDescriptor_options_reflection_error(
                &descriptor,
                option,
                None,
            );
            made.map(|state| {
                let max_threads = u32::try_from(state.maxTotalThreadsPerThreadgroup()).unwrap_or(u32::MAX);
                Compiled { state, max_threads }
            })
        };
        let values = format!("{constants:?}");
        let key = self.archives.key([&source[..], &entry, &values, LANGUAGE]);
        // The file stays until the pipeline is made: Metal may read it then.
        if let Some((archive, _file)) = self.archives.open(device, &key) {
            refer(&descriptor, &archive);
            // An archive that lacks the pipeline, as one that Metal considers outdated does, is written anew.
            if let Ok(compiled) = make(MTLPipelineOption::FailOnBinaryArchiveMiss) {
                return Ok((compiled, Ok(())));
            }
            descriptor.setBinaryArchives(None);
        }
        let filled = self.archives.fill(device, &descriptor, &entry);
        let compiled = make(MTLPipelineOption::None).map_err(|error| Error::pipeline(&entry, &error))?;
        let kept = filled.and_then(|archive| match archive {
            Some(archive) => self.archives.keep(&key, &archive, &entry),
            None => Ok(()),
        });
        Ok((compiled, kept))
    }
}

/// The language version and the math mode of [`options`], as a part of names on disk.
const LANGUAGE: &str = "Metal 3.1, safe math, precise functions";

/// Options of the compiler. Both are set whatever their defaults, which change with the SDK: infinities and NaN keep their meaning.
fn options() -> Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    // The math mode is there from macOS 15 and iOS 18 on. Before, switching fast math off selects precise functions too.
    if options.respondsToSelector(sel!(setMathMode:)) {
        options.setMathMode(MTLMathMode::Safe);
        options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    } else {
        #[allow(deprecated, reason = "what systems before macOS 15 and iOS 18 have")]
        options.setFastMathEnabled(false);
    }
    options
}

/// The compiled function with its constants, as a descriptor of a pipeline.
fn describe(
    device: &MetalDevice,
    entry: &str,
    source: &str,
    constants: &[Constant],
) -> Result<Retained<MTLComputePipelineDescriptor>, Error> {
    let name = NSString::from_str(entry);
    let library = device
        .newLibraryWithSource_options_error(&NSString::from_str(source), Some(&options()))
        .map_err(|error| Error::compile(entry, &error))?;
    let function = library
        .newFunctionWithName_constantValues_error(&name, &values(constants))
        .map_err(|error| Error::compile(entry, &error))?;
    let descriptor = MTLComputePipelineDescriptor::new();
    descriptor.setComputeFunction(Some(&function));
    descriptor.setLabel(Some(&name));
    Ok(descriptor)
}

/// The values of function constants, numbered in order.
fn values(constants: &[Constant]) -> Retained<MTLFunctionConstantValues> {
    let values = MTLFunctionConstantValues::new();
    for (index, constant) in constants.iter().enumerate() {
        // Apple's processors are little-endian: a value of a smaller type is in the first bytes.
        let raw = constant.raw().to_le_bytes();
        // SAFETY: the value has at least as many bytes as its type, and Metal copies them.
        unsafe {
            values.setConstantValue_type_atIndex(
                NonNull::from(&raw).cast(),
                data_type(constant.scalar()),
                index,
            );
        }
    }
    values
}

const fn data_type(scalar: ScalarType) -> MTLDataType {
    match scalar {
        ScalarType::Bool => MTLDataType::Bool,
        ScalarType::U8 => MTLDataType::UChar,
        ScalarType::I8 => MTLDataType::Char,
        ScalarType::U16 => MTLDataType::UShort,
        ScalarType::I16 => MTLDataType::Short,
        ScalarType::U32 => MTLDataType::UInt,
        ScalarType::I32 => MTLDataType::Int,
        ScalarType::U64 | ScalarType::Usize => MTLDataType::ULong,
        ScalarType::I64 => MTLDataType::Long,
        ScalarType::F32 => MTLDataType::Float,
        ScalarType::F16 => MTLDataType::Half,
        ScalarType::Bf16 => MTLDataType::BFloat,
    }
}
