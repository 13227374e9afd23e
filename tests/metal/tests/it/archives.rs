//! Binary archives: what a second process need not compile.

use std::path::Path;
use std::process::Command;

use objc2::rc::{Retained, autoreleasepool};
use objc2_foundation::{NSArray, NSURL};
use objc2_metal::*;

use crate::host::{Host, Object, file, says, string};

/// Names the archive for the process that a test starts.
const VARIABLE: &str = "FLASHTILE_TEST_ARCHIVE";

fn url(path: &Path) -> Retained<NSURL> {
    NSURL::fileURLWithPath(&string(path.to_str().unwrap()))
}

fn open(host: &Host, path: Option<&Path>) -> Result<Object<dyn MTLBinaryArchive>, String> {
    let descriptor = MTLBinaryArchiveDescriptor::new();
    descriptor.setUrl(path.map(url).as_deref());
    host.device
        .newBinaryArchiveWithDescriptor_error(&descriptor)
        .map_err(|e| format!("{} {}: {}", e.domain(), e.code(), e.localizedDescription()))
}

fn descriptor(host: &Host, name: &str, count: u32) -> Retained<MTLComputePipelineDescriptor> {
    let descriptor = MTLComputePipelineDescriptor::new();
    descriptor.setComputeFunction(Some(&host.function(name, count)));
    descriptor
}

/// A pipeline that only the archive has.
fn from(host: &Host, archive: &Object<dyn MTLBinaryArchive>, name: &str, count: u32) -> Result<(), String> {
    let descriptor = descriptor(host, name, count);
    descriptor.setBinaryArchives(Some(&NSArray::from_retained_slice(std::slice::from_ref(archive))));
    let options = MTLPipelineOption::FailOnBinaryArchiveMiss;
    host.device
        .newComputePipelineStateWithDescriptor_options_reflection_error(&descriptor, options, None)
        .map(drop)
        .map_err(|e| e.localizedDescription().to_string())
}

fn write(host: &Host, path: &Path) {
    let archive = open(host, None).unwrap();
    archive.addComputePipelineFunctionsWithDescriptor_error(&descriptor(host, "add", 64)).unwrap();
    archive.addComputePipelineFunctionsWithDescriptor_error(&descriptor(host, "put", 64)).unwrap();
    archive.addComputePipelineFunctionsWithDescriptor_error(&descriptor(host, "put", 64)).unwrap();
    archive.serializeToURL_error(&url(path)).unwrap();
}

#[test]
fn a_second_process_compiles_no_pipeline() {
    let host = Host::new();
    let path = file("archive");
    autoreleasepool(|_| {
        write(&host, &path);
        assert_eq!(host.control.counters().pipelines, 2);
    });
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "archives::in_a_second_process", "--ignored"])
        .env(VARIABLE, &path)
        .status()
        .unwrap();
    assert!(status.success());
    std::fs::remove_file(&path).unwrap();
}

#[test]
#[ignore = "a part of `a_second_process_compiles_no_pipeline`"]
fn in_a_second_process() {
    let path = std::env::var_os(VARIABLE).expect("the test that starts this process names the archive");
    let host = Host::new();
    autoreleasepool(|_| {
        let archive = open(&host, Some(Path::new(&path))).unwrap();
        assert_eq!((from(&host, &archive, "add", 64), from(&host, &archive, "put", 64)), (Ok(()), Ok(())));
        let counters = host.control.counters();
        assert_eq!((counters.pipelines, counters.archive_hits), (0, 2));
        // Another constant is another pipeline.
        says(&from(&host, &archive, "add", 65).unwrap_err(), "do not have this pipeline");
    });
}

#[test]
fn damaged_and_foreign_archives_are_refused() {
    let host = Host::new();
    let path = file("damaged");
    autoreleasepool(|_| {
        write(&host, &path);
        let whole = std::fs::read(&path).unwrap();
        for cut in [0, 1, whole.len() / 2, whole.len() - 2] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            says(&open(&host, Some(&path)).unwrap_err(), "MTLBinaryArchiveDomain 1: ");
        }
        for at in 0..whole.len() - 1 {
            let mut bytes = whole.clone();
            bytes[at] ^= 4;
            std::fs::write(&path, &bytes).unwrap();
            assert!(open(&host, Some(&path)).is_err(), "byte {at}");
        }
        std::fs::write(&path, &whole).unwrap();
        assert!(open(&host, Some(&path)).is_ok());
        host.control.refuse_archive();
        says(&open(&host, Some(&path)).unwrap_err(), "the archive is refused");
        assert!(open(&host, Some(&path)).is_ok());
        let other = Host::with(flashtile_metal_standin::Profile::m1());
        says(&open(&other, Some(&path)).unwrap_err(), "of another device or system");
        std::fs::remove_file(&path).unwrap();
        says(&open(&host, Some(&path)).unwrap_err(), "MTLBinaryArchiveDomain 1: ");
    });
}
