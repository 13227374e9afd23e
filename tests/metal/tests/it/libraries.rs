//! Libraries, functions, constants, options, reflection and profiles.

use std::ffi::c_void;
use std::ptr::NonNull;

use flashtile_metal_standin::{Profile, metallib};
use objc2::AnyThread;
use objc2::rc::autoreleasepool;
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{Message, sel};
use objc2_foundation::{NSDictionary, NSNumber, NSProcessInfo, NSRange, NSString, NSURL};
use objc2_metal::*;

use crate::host::{Host, TEXT, bind, file, options, read, says, size, string};

#[test]
fn names_and_functions() {
    let host = Host::new();
    autoreleasepool(|_| {
        let library = host.library(TEXT).unwrap();
        let names: Vec<String> = library.functionNames().iter().map(|n| n.to_string()).collect();
        assert_eq!(names, ["put", "copy", "add", "sum", "limited", "wild"]);
        assert!(library.newFunctionWithName(&string("gone")).is_none());
        let function = library.newFunctionWithName(&string("add")).unwrap();
        assert_eq!(
            (function.name().to_string(), function.functionType()),
            ("add".into(), MTLFunctionType::Kernel)
        );
        let constants = function.functionConstantsDictionary();
        let count = constants.objectForKey(&string("COUNT")).unwrap();
        assert_eq!((count.index(), count.r#type(), count.required()), (0, MTLDataType::UInt, true));
        // The constant is not set.
        let e = host.device.newComputePipelineStateWithFunction_error(&function).unwrap_err();
        says(&e.localizedDescription().to_string(), "function constant 0 (`COUNT`) is not set");
    });
}

const ALL: &str = "#include <metal_stdlib>
using namespace metal;
constant bool A [[function_constant(0)]];
constant char B [[function_constant(1)]];
constant uchar C [[function_constant(2)]];
constant short D [[function_constant(3)]];
constant ushort E [[function_constant(4)]];
constant int F [[function_constant(5)]];
constant uint G [[function_constant(6)]];
constant long H [[function_constant(7)]];
constant ulong I [[function_constant(8)]];
constant float J [[function_constant(9)]];
constant half K [[function_constant(10)]];
constant uint L [[function_constant(11)]];
constant uint M [[function_constant(12)]];
kernel void each(device float* x [[buffer(0)]]) {
    x[0] = A ? 1.0f : 0.0f; x[1] = float(B); x[2] = float(C); x[3] = float(D); x[4] = float(E); x[5] = float(F); x[6] = float(G);
    x[7] = float(H); x[8] = float(I); x[9] = J; x[10] = float(K); x[11] = float(L); x[12] = float(M);
}
";

#[test]
fn constants_of_every_type() {
    let host = Host::new();
    let x = host.zeros(13 * 4);
    autoreleasepool(|_| {
        let library = host.library(ALL).unwrap();
        let values = MTLFunctionConstantValues::init(MTLFunctionConstantValues::alloc());
        fn at<T>(v: &T) -> NonNull<c_void> {
            NonNull::from(v).cast()
        }
        unsafe {
            values.setConstantValue_type_atIndex(at(&true), MTLDataType::Bool, 0);
            values.setConstantValue_type_atIndex(at(&-1i8), MTLDataType::Char, 1);
            values.setConstantValue_type_atIndex(at(&200u8), MTLDataType::UChar, 2);
            values.setConstantValue_type_atIndex(at(&-300i16), MTLDataType::Short, 3);
            values.setConstantValue_type_atIndex(at(&60000u16), MTLDataType::UShort, 4);
            values.setConstantValue_type_withName(at(&-70000i32), MTLDataType::Int, &string("F"));
            values.setConstantValue_type_atIndex(at(&70000u32), MTLDataType::UInt, 6);
            values.setConstantValue_type_atIndex(at(&-5i64), MTLDataType::Long, 7);
            values.setConstantValue_type_atIndex(at(&6u64), MTLDataType::ULong, 8);
            values.setConstantValue_type_atIndex(at(&0.25f32), MTLDataType::Float, 9);
            values.setConstantValue_type_atIndex(at(&0x3800u16), MTLDataType::Half, 10);
            values.setConstantValues_type_withRange(at(&[11u32, 12]), MTLDataType::UInt, NSRange::new(11, 2));
            // Values of other libraries' constants are left out.
            values.setConstantValue_type_atIndex(at(&1u32), MTLDataType::UInt, 40);
        }
        let function = library.newFunctionWithName_constantValues_error(&string("each"), &values).unwrap();
        let pipeline = host.device.newComputePipelineStateWithFunction_error(&function).unwrap();
        let ran = host.run(|e| {
            e.setComputePipelineState(&pipeline);
            bind(e, &[&x]);
            e.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(1));
        });
        assert_eq!(ran, Ok(()));
        let expected =
            [1.0, -1.0, 200.0, -300.0, 60000.0, -70000.0, 70000.0, -5.0, 6.0, 0.25, 0.5, 11.0, 12.0];
        assert_eq!(read::<f32>(&x), expected);
        unsafe { values.setConstantValue_type_atIndex(at(&1u32), MTLDataType::UInt, 0) };
        let e = library.newFunctionWithName_constantValues_error(&string("each"), &values).unwrap_err();
        says(&e.localizedDescription().to_string(), "`A` is declared bool, got a uint");
        let e = library.newFunctionWithName_constantValues_error(&string("gone"), &values).unwrap_err();
        assert_eq!(e.code(), MTLLibraryError::FunctionNotFound.0 as isize);
    });
}

#[test]
fn options_decide_the_program() {
    let host = Host::new();
    let source = "#include <metal_stdlib>
kernel void f(device float* x [[buffer(0)]]) { x[0] = VALUE; x[1] = NAME; }
";
    let x = host.zeros(8);
    autoreleasepool(|_| {
        let options = options();
        let keys = [&*string("VALUE"), &*string("NAME")];
        let number: objc2::rc::Retained<NSObject> =
            unsafe { objc2::rc::Retained::cast_unchecked(NSNumber::new_i32(3)) };
        let text: objc2::rc::Retained<NSObject> =
            unsafe { objc2::rc::Retained::cast_unchecked(string("4.0f")) };
        let macros = NSDictionary::<NSString, NSObject>::from_retained_objects(&keys, &[number, text]);
        unsafe { options.setPreprocessorMacros(Some(&macros)) };
        let library =
            host.device.newLibraryWithSource_options_error(&string(source), Some(&options)).unwrap();
        let function = library.newFunctionWithName(&string("f")).unwrap();
        let pipeline = host.device.newComputePipelineStateWithFunction_error(&function).unwrap();
        host.run(|e| {
            e.setComputePipelineState(&pipeline);
            bind(e, &[&x]);
            e.dispatchThreadgroups_threadsPerThreadgroup(size(1), size(1));
        })
        .unwrap();
        assert_eq!(read::<f32>(&x), [3.0, 4.0]);
        let old = super::host::options();
        old.setLanguageVersion(MTLLanguageVersion::Version3_0);
        let bfloat = string("kernel void f(device bfloat* x [[buffer(0)]]) {}");
        let e = host.device.newLibraryWithSource_options_error(&bfloat, Some(&old)).unwrap_err();
        says(&e.localizedDescription().to_string(), "unknown type name 'bfloat' in Metal 3.0");
        old.setLanguageVersion(MTLLanguageVersion::Version4_0);
        let e = host.device.newLibraryWithSource_options_error(&bfloat, Some(&old)).unwrap_err();
        assert_eq!(e.code(), MTLLibraryError::Unsupported.0 as isize);
    });
}

/// Blocks are called with an object or an error, on another thread.
#[test]
fn libraries_and_pipelines_that_come_later() {
    let host = Host::new();
    autoreleasepool(|_| {
        let (sender, came) = std::sync::mpsc::channel();
        let block = block2::RcBlock::new(
            move |library: *mut ProtocolObject<dyn MTLLibrary>, error: *mut objc2_foundation::NSError| {
                let names = unsafe { library.as_ref() }.map(|l| l.functionNames().count());
                let code = unsafe { error.as_ref() }.map(|e| e.code());
                sender.send((names, code, std::thread::current().id())).unwrap();
            },
        );
        let compile = |source: &str| {
            let source = string(source);
            let block = block2::RcBlock::as_ptr(&block);
            unsafe {
                host.device.newLibraryWithSource_options_completionHandler(&source, Some(&options()), block)
            };
            came.recv_timeout(std::time::Duration::from_secs(60)).unwrap()
        };
        let (names, error, thread) = compile(TEXT);
        assert_eq!((names, error), (Some(6), None));
        assert_ne!(thread, std::thread::current().id());
        assert_eq!(compile("no program").1, Some(MTLLibraryError::CompileFailure.0 as isize));
        let (sender, came) = std::sync::mpsc::channel();
        let block = block2::RcBlock::new(
            move |pipeline: *mut ProtocolObject<dyn MTLComputePipelineState>,
                  _: *mut objc2_foundation::NSError| {
                sender.send(unsafe { pipeline.as_ref() }.map(|p| p.threadExecutionWidth())).unwrap();
            },
        );
        let block = block2::RcBlock::as_ptr(&block);
        let function = host.function("put", 1);
        unsafe { host.device.newComputePipelineStateWithFunction_completionHandler(&function, block) };
        assert_eq!(came.recv_timeout(std::time::Duration::from_secs(60)), Ok(Some(32)));
        let descriptor = MTLFunctionDescriptor::functionDescriptor();
        descriptor.setName(Some(&string("put")));
        let library = host.library(TEXT).unwrap();
        assert_eq!(library.newFunctionWithDescriptor_error(&descriptor).unwrap().name().to_string(), "put");
        descriptor.setName(Some(&string("gone")));
        let e = library.newFunctionWithDescriptor_error(&descriptor).unwrap_err();
        assert_eq!(e.code(), MTLLibraryError::FunctionNotFound.0 as isize);
    });
}

#[test]
fn libraries_of_files() {
    let host = Host::new();
    let path = file("library.metallib");
    std::fs::write(&path, metallib(TEXT, MTLLanguageVersion::Version3_1)).unwrap();
    autoreleasepool(|_| {
        let url = NSURL::fileURLWithPath(&string(path.to_str().unwrap()));
        assert_eq!(
            (url.path().unwrap().to_string(), url.isFileURL()),
            (path.to_str().unwrap().to_owned(), true)
        );
        let library = host.device.newLibraryWithURL_error(&url).unwrap();
        assert!(library.newFunctionWithName(&string("put")).is_some());
        std::fs::write(&path, "MTLB of somebody else").unwrap();
        let e = host.device.newLibraryWithURL_error(&url).unwrap_err();
        says(&e.localizedDescription().to_string(), "Invalid library file");
        std::fs::remove_file(&path).unwrap();
        let e = host.device.newLibraryWithURL_error(&url).unwrap_err();
        assert_eq!(e.code(), MTLLibraryError::FileNotFound.0 as isize);
    });
}

#[test]
fn pipelines_tell_their_arguments() {
    let host = Host::new();
    autoreleasepool(|_| {
        let mut reflection = None;
        let options = MTLPipelineOption::BindingInfo | MTLPipelineOption::BufferTypeInfo;
        let pipeline = unsafe {
            host.device.newComputePipelineStateWithFunction_options_reflection_error(
                &host.function("sum", 1),
                options,
                Some(&mut reflection),
            )
        };
        let pipeline = pipeline.unwrap();
        assert_eq!((pipeline.threadExecutionWidth(), pipeline.staticThreadgroupMemoryLength()), (32, 0));
        let bindings = reflection.unwrap().bindings();
        let found: Vec<_> =
            bindings.iter().map(|b| (b.name().to_string(), b.index(), b.r#type(), b.access())).collect();
        let (buffer, memory) = (MTLBindingType::Buffer, MTLBindingType::ThreadgroupMemory);
        let (read_only, both) = (MTLBindingAccess::ReadOnly, MTLBindingAccess::ReadWrite);
        let expected = [("a", 0, buffer, read_only), ("c", 1, buffer, both), ("t", 0, memory, both)];
        assert_eq!(found, expected.map(|(n, i, t, a)| (n.to_owned(), i, t, a)));
    });
}

#[test]
fn devices_of_profiles() {
    use MTLGPUFamily as Family;
    let of = |profile: Profile| {
        let host = Host::with(profile);
        autoreleasepool(|_| {
            let device = &host.device;
            let has = |f: Family| device.supportsFamily(f);
            let version = NSProcessInfo::processInfo().operatingSystemVersion();
            let object: &NSObject =
                unsafe { &*std::ptr::from_ref::<ProtocolObject<dyn MTLDevice>>(device).cast() };
            let sets: bool = unsafe {
                objc2::msg_send![object, respondsToSelector: sel!(newResidencySetWithDescriptor:error:)]
            };
            let generation =
                [has(Family::Apple7), has(Family::Apple8), has(Family::Apple9), has(Family::Apple10)];
            (device.name().to_string(), generation.iter().filter(|g| **g).count(), version.majorVersion, sets)
        })
    };
    assert_eq!(of(Profile::m1()), ("Apple M1".into(), 1, 14, false));
    assert_eq!(of(Profile::m2()), ("Apple M2".into(), 2, 15, true));
    assert_eq!(of(Profile::m3_max()), ("Apple M3 Max".into(), 3, 15, true));
    assert_eq!(of(Profile::m5()), ("Apple M5".into(), 4, 26, true));
    assert_eq!(of(Profile::a17_pro()), ("Apple A17 Pro GPU".into(), 3, 18, true));
    let host = Host::with(Profile::m3_max());
    assert!(host.device.hasUnifiedMemory() && host.device.recommendedMaxWorkingSetSize() > 1 << 35);
    assert_eq!(host.device.maxThreadgroupMemoryLength(), 32768);
    assert_eq!(host.device.maxThreadsPerThreadgroup().depth, 1024);
    autoreleasepool(|_| assert_eq!(host.device.architecture().name().to_string(), "applegpu_g15s"));
    assert_ne!(host.device.registryID(), Host::new().device.registryID());
}

#[test]
fn options_that_a_system_lacks() {
    let has = |profile: Profile| {
        let host = Host::with(profile);
        let options = options();
        let has = options.respondsToSelector(sel!(setMathMode:));
        if has {
            options.setMathMode(MTLMathMode::Safe);
        } else {
            #[allow(deprecated, reason = "what old systems have")]
            options.setFastMathEnabled(false);
        }
        autoreleasepool(|_| {
            assert!(host.device.newLibraryWithSource_options_error(&string(TEXT), Some(&options)).is_ok());
        });
        has
    };
    assert_eq!([has(Profile::m1()), has(Profile::m2()), has(Profile::m1())], [false, true, false]);
}

#[test]
fn the_default_device_is_one() {
    autoreleasepool(|_| {
        let first = MTLCreateSystemDefaultDevice().unwrap();
        let all = MTLCopyAllDevices();
        assert_eq!((all.count(), all.objectAtIndex(0).registryID()), (1, first.registryID()));
        let kept = first.retain();
        assert!(std::ptr::eq(&*kept, &*first));
    });
}
