//! Faults that no real device offers when a test wants them.

use flashtile_metal_standin::Profile;
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSArray;
use objc2_metal::*;

use crate::host::{Host, TEXT, encode, finish, read, says, string, wait};

#[test]
fn libraries_and_pipelines() {
    let host = Host::new();
    autoreleasepool(|_| {
        host.control.fail_library("program_source:1: error: no such luck");
        says(
            &host.library(TEXT).unwrap_err(),
            "MTLLibraryErrorDomain 3: program_source:1: error: no such luck",
        );
        assert!(host.library(TEXT).is_ok());
        host.control.fail_pipeline("Compiler encountered an internal error");
        let function = host.function("put", 1);
        let e = host.device.newComputePipelineStateWithFunction_error(&function).unwrap_err();
        assert_eq!(e.localizedDescription().to_string(), "Compiler encountered an internal error");
        assert!(host.device.newComputePipelineStateWithFunction_error(&function).is_ok());
    });
}

#[test]
fn out_of_memory() {
    let host = Host::new();
    let options = MTLResourceOptions::StorageModeShared;
    host.control.fail_buffer(1);
    assert!(host.device.newBufferWithLength_options(16, options).is_some());
    assert!(host.device.newBufferWithLength_options(16, options).is_none());
    assert!(host.device.newBufferWithLength_options(16, options).is_some());
    let mut profile = Profile::m1();
    profile.memory = 1000;
    let host = Host::with(profile);
    let first = host.zeros(600);
    assert_eq!(host.device.currentAllocatedSize(), 600);
    assert!(host.device.newBufferWithLength_options(500, options).is_none());
    drop(first);
    assert!(host.device.newBufferWithLength_options(500, options).is_some());
    assert_eq!((host.control.counters().bytes, host.control.counters().peak_bytes), (0, 600));
}

#[test]
fn command_buffers_fail_by_code() {
    let host = Host::new();
    let x = host.zeros(256);
    for code in [
        MTLCommandBufferError::Timeout,
        MTLCommandBufferError::PageFault,
        MTLCommandBufferError::OutOfMemory,
        MTLCommandBufferError::AccessRevoked,
        MTLCommandBufferError::Internal,
    ] {
        autoreleasepool(|_| {
            host.control.fail_command_buffer(code);
            let commands = host.commands();
            encode(&commands, |e| host.put(e, &x, 0, 1));
            commands.commit();
            assert!(wait(&commands).is_err());
            let e = commands.error().unwrap();
            assert_eq!((e.code(), commands.status()), (code.0 as isize, MTLCommandBufferStatus::Error));
            assert_eq!(&*e.domain(), unsafe { MTLCommandBufferErrorDomain });
        });
    }
    host.control.fail_innocent_command_buffer();
    says(&host.run(|e| host.put(e, &x, 0, 1)).unwrap_err(), "Innocent Victim");
    assert_eq!(read::<u32>(&x)[0], 0, "what fails does not run");
    assert_eq!(host.run(|e| host.put(e, &x, 0, 1)), Ok(()));
    assert_eq!(host.control.take_violations(), [] as [String; 0]);
}

#[test]
fn a_kernel_out_of_bounds_is_a_page_fault() {
    let host = Host::new();
    autoreleasepool(|_| {
        let x = host.zeros(256);
        let descriptor = MTLCommandBufferDescriptor::new();
        descriptor.setErrorOptions(MTLCommandBufferErrorOption::EncoderExecutionStatus);
        let commands = host.queue.commandBufferWithDescriptor(&descriptor).unwrap();
        let labeled = |label: &str, name: &str| {
            encode(&commands, |e| {
                e.setLabel(Some(&string(label)));
                e.insertDebugSignpost(&string(name));
                e.setComputePipelineState(&host.pipeline(name));
                crate::host::bind(e, &[&x]);
                crate::host::set(e, &1u32, 1);
                e.dispatchThreadgroups_threadsPerThreadgroup(crate::host::size(1), crate::host::size(64));
            });
        };
        labeled("right", "put");
        labeled("wrong", "wild");
        labeled("after", "put");
        let e = finish(&commands).unwrap_err();
        says(&e, "kernel wild: thread 0 of threadgroup (0, 0, 0)");
        let error = commands.error().unwrap();
        assert_eq!(error.code(), MTLCommandBufferError::PageFault.0 as isize);
        let infos = error.userInfo().objectForKey(unsafe { MTLCommandBufferEncoderInfoErrorKey }).unwrap();
        let infos: Retained<NSArray<ProtocolObject<dyn MTLCommandBufferEncoderInfo>>> =
            unsafe { Retained::cast_unchecked(infos) };
        let states: Vec<_> = infos.iter().map(|i| (i.label().to_string(), i.errorState())).collect();
        let state = |label: &str, state| (label.to_owned(), state);
        assert_eq!(
            states,
            [
                state("right", MTLCommandEncoderErrorState::Completed),
                state("wrong", MTLCommandEncoderErrorState::Faulted),
                state("after", MTLCommandEncoderErrorState::Pending),
            ]
        );
        assert_eq!(infos.objectAtIndex(1).debugSignposts().objectAtIndex(0).to_string(), "wild");
    });
}
