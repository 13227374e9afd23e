//! Compiled pipelines: kept in memory once a key, and on disk in binary archives.

use crate::support::{Tensors, control_of, expected, metal};
use flashtile_metal_standin::Profile;
use std::path::Path;
use std::process::Command;

/// Says to the process that a test starts what it has to find.
const EXPECTED: &str = "FLASHTILE_TEST_FOUND";

fn again(folder: &Path, name: &str, expected: &str) {
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored"])
        .env("FLASHTILE_CACHE_DIR", folder)
        .env(EXPECTED, expected)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
}

const IN_A_PROCESS: &str = "kernels_on_disk::in_a_process_of_its_own";

#[test]
fn a_second_process_compiles_nothing_and_damaged_archives_are_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let files = || {
        let mut files: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    again(folder.path(), IN_A_PROCESS, "compiled");
    let kept = files();
    assert!(!kept.is_empty());
    again(folder.path(), IN_A_PROCESS, "found");
    assert_eq!(files(), kept);
    // One byte less, another byte, and nothing.
    let spoils: [fn(&mut Vec<u8>); 3] =
        [|bytes| bytes.truncate(bytes.len() - 1), |bytes| bytes[40] ^= 1, Vec::clear];
    for spoil in spoils {
        for file in &kept {
            let mut bytes = std::fs::read(file).unwrap();
            spoil(&mut bytes);
            std::fs::write(file, bytes).unwrap();
        }
        again(folder.path(), IN_A_PROCESS, "compiled");
        again(folder.path(), IN_A_PROCESS, "found");
        assert_eq!(files(), kept);
    }
    // An archive that Metal refuses is rebuilt too.
    again(folder.path(), IN_A_PROCESS, "refused");
    again(folder.path(), IN_A_PROCESS, "found");
    // Another device, and another version of the system, have archives of their own.
    again(folder.path(), IN_A_PROCESS, "other device");
    assert!(files().len() > kept.len());
    // A folder that cannot be written is reported, and kernels still run.
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    again(&file.join("folder"), IN_A_PROCESS, "not kept");
}

#[test]
#[ignore = "a part of `a_second_process_compiles_nothing_and_damaged_archives_are_rebuilt`"]
fn in_a_process_of_its_own() {
    let found = std::env::var(EXPECTED).unwrap();
    let other = found == "other device";
    let metal = metal(if other { Profile::m5() } else { Profile::m3_max() });
    let control = control_of(&metal);
    if found == "refused" {
        control.refuse_archive();
    }
    // Of several threads one makes a pipeline, and the others wait for it.
    let out = std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(|| expected(&metal, 1, 100))).collect();
        let all: Vec<_> = all.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(all.iter().all(|out| *out == all[0]));
        all.into_iter().next().unwrap()
    });
    assert!(out.iter().all(|x| x.is_finite()));
    let counters = control.counters();
    let compiled = counters.pipelines;
    match found.as_str() {
        "found" => assert_eq!((compiled, counters.archive_hits > 0), (0, true)),
        "refused" => assert_eq!(compiled, 1),
        _ => assert!(compiled > 0),
    }
    // A split decode has two kernels.
    assert!(compiled <= 2, "{compiled}");
    if found == "not kept" {
        let mut tensors = Tensors::new(&metal, 1, 100);
        let desc = tensors.desc();
        let _ = tensors.tensors();
        let mut session = metal.session();
        let plan = session.plan(&desc).unwrap().launches().clone();
        let placed = plan.place(&flashtile_gpu::launches::Strides::default(), false).unwrap();
        let (instance, constants) = plan.constants(&placed, &[], true).swap_remove(0);
        let (_, kept) = metal.gpu().prewarm(instance, &constants).unwrap();
        assert!(matches!(kept, Err(flashtile_metal::DeviceError::KernelFolder { .. })), "{kept:?}");
    }
}
