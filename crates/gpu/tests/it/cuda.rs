//! The kernels printed as CUDA, compiled by NVRTC.
//!
//! `FLASHTILE_NVRTC` names the compiler; without it the tests say that they did not run.

use flashtile_gpu::kernels::kv::PAGED;
use flashtile_gpu::registry::instances;
use flashtile_kernel::cuda::{Architecture, Compiler, NVRTC_VARIABLE, Program};
use flashtile_kernel::source::ParameterKind;
use flashtile_kernel::{Constant, Generic, Instance, ScalarType};
use std::collections::HashSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

fn compiler() -> Option<Compiler> {
    if std::env::var_os(NVRTC_VARIABLE).is_none() {
        eprintln!("SKIPPED, printed CUDA is not compiled: {NVRTC_VARIABLE} is not set");
        return None;
    }
    Some(Compiler::load().unwrap())
}

/// The program with every `#[constant]` flag set, the one with the most code, rows at multiples of 16 bytes, and pages of any size.
fn program(instance: &Instance) -> Program {
    let constants = instance.kernel().parameters.iter().filter_map(|parameter| match parameter.kind {
        ParameterKind::Constant(ScalarType::Bool) => Some(Constant::of(true)),
        ParameterKind::Constant(ScalarType::U32) if parameter.name == "row_align" => {
            Some(Constant::of(16u32))
        }
        ParameterKind::Constant(ScalarType::U32) if parameter.name == "paging" => Some(Constant::of(PAGED)),
        ParameterKind::Constant(other) => panic!("{}: a constant of {other}", parameter.name),
        _ => None,
    });
    Program::of(instance, &constants.collect::<Vec<_>>())
}

fn compile(all: &[(Instance, &str)]) {
    let Some(compiler) = compiler() else { return };
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                while let Some((instance, name)) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let target =
                        Architecture { name: (*name).to_owned(), machine_code: name.starts_with("sm_") };
                    if let Err(why) = compiler.compile(&program(instance), &target) {
                        failed.lock().unwrap().push(format!("{} for {name}: {why}", instance.entry()));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), all.len(), failed.join("\n"));
}

const ARCHITECTURES: [&str; 3] = ["compute_75", "compute_80", "sm_90"];

/// The first of generics that are sizes: a head dimension.
fn dim(instance: &Instance) -> usize {
    let size = |generic: &Generic| match generic {
        Generic::Usize(size) => Some(*size),
        _ => None,
    };
    instance.generics().iter().find_map(size).unwrap_or(0)
}

/// The kernel of an instance, and each of its generics that says how rows are stored.
#[derive(PartialEq, Eq, Hash)]
enum Kind {
    Kernel(&'static str),
    Format(Generic),
}

fn kinds(instance: &Instance) -> Vec<Kind> {
    let generics = instance.all_generics();
    let formats = generics.iter().filter(|generic| matches!(generic, Generic::U32(_))).copied();
    std::iter::once(Kind::Kernel(instance.kernel().name)).chain(formats.map(Kind::Format)).collect()
}

#[test]
fn an_instance_of_each_kind_compiles() {
    // Compilations take longer the larger a row is: the smallest instance of each kernel and of each format of rows, the architectures in
    // turn.
    let mut all = instances();
    all.sort_by_key(dim);
    let mut seen = HashSet::new();
    all.retain(|instance| {
        let new = kinds(instance).into_iter().map(|kind| seen.insert(kind));
        dim(instance) < 512 && new.fold(false, |any, new| any | new)
    });
    let all: Vec<_> = all.into_iter().zip(ARCHITECTURES.into_iter().cycle()).collect();
    eprintln!("{} instances", all.len());
    compile(&all);
    // The copy kernel, which times are compared with, is in no list.
    compile(&ARCHITECTURES.map(|name| (flashtile_gpu::kernels::copy::copy::instance(), name)));
}

#[test]
#[ignore = "takes a quarter of an hour: NVRTC compiles one program at a time"]
fn every_instance_compiles_for_every_architecture() {
    let all: Vec<_> = instances()
        .into_iter()
        .flat_map(|instance| ARCHITECTURES.map(|name| (instance.clone(), name)))
        .collect();
    compile(&all);
}
