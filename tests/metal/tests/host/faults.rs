//! Failures of the device arrive as typed errors, with their numbers, and the next run works.

use crate::support::{Tensors, control_of, expected, metal};
use flashtile::Unsupported;
use flashtile_kernel::LaunchError;
use flashtile_metal::objc2_metal::MTLCommandBufferError;
use flashtile_metal::{CommandBufferError, DeviceError, Metal, MetalError, SessionError};
use flashtile_metal_standin::Profile;

fn run(metal: &Metal) -> Result<(), MetalError> {
    let mut tensors = Tensors::new(metal, 1, 100);
    let desc = tensors.desc();
    let (inputs, mut outputs) = tensors.tensors();
    metal.session().run(&desc, &inputs, &mut outputs)?;
    metal.gpu().synchronize().map_err(|error| SessionError::Launch(LaunchError::Device(error)))
}

fn failure(metal: &Metal) -> DeviceError {
    match run(metal) {
        Err(SessionError::Launch(LaunchError::Device(error))) => error,
        other => panic!("{other:?}"),
    }
}

/// A device without kernels on disk, which would not be compiled.
fn fresh() -> Metal {
    let mut profile = Profile::m3_max();
    profile.name = format!("Apple M3 Max of {:?}", std::thread::current().id());
    metal(profile)
}

#[test]
fn errors_of_the_compiler_have_its_log() {
    let metal = fresh();
    control_of(&metal).fail_library("program_source:7:1: error: unknown type name 'flaot'");
    let error = failure(&metal);
    assert!(
        matches!(&error, DeviceError::Compile { log, .. } if log.contains("program_source:7:1")),
        "{error:?}"
    );
    assert!(error.to_string().contains("does not compile"), "{error}");
    control_of(&metal).fail_pipeline("Compiler encountered an internal error");
    let error = failure(&metal);
    let said = matches!(&error, DeviceError::Pipeline { log, .. } if log.contains("internal error"));
    assert!(said, "{error:?}");
    run(&metal).unwrap();
}

#[test]
fn lack_of_memory_has_its_size() {
    let metal = fresh();
    run(&metal).unwrap();
    control_of(&metal).fail_buffer(0);
    let error = metal.gpu().uninit::<f32>(1000).unwrap_err();
    assert_eq!(error, DeviceError::Memory { bytes: 4000, max: 1 << 35 });
    // More than a buffer may have is not asked for.
    let error = metal.gpu().uninit::<f32>(1 << 40).unwrap_err();
    assert_eq!(error, DeviceError::Memory { bytes: 4 << 40, max: 1 << 35 });
    let error = metal.zeros(flashtile_metal::ScalarType::F32, [usize::MAX, 2, 1, 1]).unwrap_err();
    assert!(error.to_string().contains("no memory"), "{error}");
    // In the middle of a session.
    for after in 0..8 {
        let mut tensors = Tensors::new(&metal, 1, 90 + after);
        let desc = tensors.desc();
        let (inputs, mut outputs) = tensors.tensors();
        control_of(&metal).fail_buffer(after);
        let mut session = metal.session();
        let result = session.run(&desc, &inputs, &mut outputs);
        let is_memory =
            matches!(result, Err(SessionError::Launch(LaunchError::Device(DeviceError::Memory { .. }))));
        assert!(is_memory, "{after}: {result:?}");
        session.run(&desc, &inputs, &mut outputs).unwrap();
        metal.gpu().synchronize().unwrap();
    }
}

#[test]
fn failures_of_command_buffers_have_their_kind_and_number() {
    let metal = fresh();
    let good = expected(&metal, 1, 100);
    for (code, kind) in [
        (MTLCommandBufferError::Timeout, CommandBufferError::Timeout),
        (MTLCommandBufferError::PageFault, CommandBufferError::PageFault),
        (MTLCommandBufferError::OutOfMemory, CommandBufferError::OutOfMemory),
        (MTLCommandBufferError::NotPermitted, CommandBufferError::NotPermitted),
        (MTLCommandBufferError::InvalidResource, CommandBufferError::InvalidResource),
        (MTLCommandBufferError::AccessRevoked, CommandBufferError::AccessRevoked),
        (MTLCommandBufferError::DeviceRemoved, CommandBufferError::DeviceRemoved),
        (MTLCommandBufferError::StackOverflow, CommandBufferError::StackOverflow),
        (MTLCommandBufferError::Internal, CommandBufferError::Internal),
    ] {
        control_of(&metal).fail_command_buffer(code);
        match failure(&metal) {
            DeviceError::Execution { kind: found, code: number, message } => {
                assert_eq!((found, number), (kind, code.0.cast_signed()));
                assert!(!message.is_empty());
            }
            other => panic!("{other:?}"),
        }
        // It is said once, and the queue goes on.
        metal.gpu().synchronize().unwrap();
        assert_eq!(expected(&metal, 1, 100), good);
    }
}

#[test]
fn a_pipeline_of_fewer_threads_is_planned_anew() {
    let of_threads = |threads| {
        let mut profile = Profile::m1();
        (profile.pipeline_threads, profile.compiles_for_declared_threads) = (threads, false);
        profile.name = format!("Apple M1 of {threads} threads");
        metal(profile)
    };
    assert_eq!(of_threads(448).facts().threads_per_group, 1024);
    // Tiles have at most 256 threads: 448 are enough for each of them.
    expected(&of_threads(448), 600, 600);
    let narrow = of_threads(100);
    let mut tensors = Tensors::new(&narrow, 600, 600);
    let desc = tensors.desc();
    let whole = narrow.plan(&desc.clone().validate().unwrap(), Default::default()).unwrap();
    assert!(32 * whole.tile().simds() > 100, "{whole}");
    let mut session = narrow.session();
    let (inputs, mut outputs) = tensors.tensors();
    session.run(&desc, &inputs, &mut outputs).unwrap();
    let plan = session.plan(&desc).unwrap().clone();
    let out = tensors.out(&narrow);
    assert!(32 * plan.tile().simds() <= 100, "{plan}");
    let ordinary = metal(Profile::m1());
    let want = expected(&ordinary, 600, 600);
    let furthest = out.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest < 1e-5, "{furthest}");
    // A limit that no plan keeps is refused with its numbers.
    let refused = run(&of_threads(16)).unwrap_err();
    let Unsupported::Threads { needed: 32, available: 16, .. } = (match &refused {
        SessionError::Unsupported(why) => why,
        other => panic!("{other:?}"),
    }) else {
        panic!("{refused:?}")
    };
}
