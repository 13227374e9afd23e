//! One kernel with every part of the language.

use flashtile_kernel::prelude::*;
use flashtile_kernel::simulator::{Memory, Simulator};
use flashtile_kernel::{Argument, ContractErrorKind, Device as _, Launch, LaunchError, Target};
use flashtile_kernel_macros::{constant, device, kernel, params};

#[params]
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Numbers.
    pub n: u32,
    pub bias: f32,
}

#[constant]
pub const LEVELS: [f32; 4] = [1.0, 2.0, 0.5, f32::INFINITY];

#[device]
pub fn affine<T: Element>(x: T, scale: f32, params: &Params) -> f32 {
    x.to_f32() * scale + params.bias
}

/// Scales x.
#[kernel(
    threads = 32 * N,
    requires(x.len() >= params.n as usize, "x holds n numbers"),
    requires(groups[0] as usize * 32 * N >= params.n as usize, "every number has a thread"),
)]
pub fn scale<T: Element, const N: usize>(
    x: &Buffer<T>,
    out: &mut Buffer<T>,
    params: &Params,
    factor: f32,
    #[constant] wide: bool,
) {
    let mut tile: Shared<f32> = shared(32 * N);
    let i = thread_position();
    let here = thread_index();
    if i < params.n {
        tile[here] = affine(x[i], factor, params);
        tile[here] *= LEVELS[1];
    }
    barrier();
    if i < params.n {
        let mut y = tile[here];
        if wide {
            y += 1.0;
        }
        out[i] = T::from_f32(y);
    }
}

#[test]
fn a_call_runs_on_the_simulator() {
    let simulator = Simulator::default();
    let x = Memory::from_slice(&(0..100).map(|i| f16::from_f32(i as f32)).collect::<Vec<_>>());
    let mut out = Memory::from_slice(&[f16::ZERO; 100]);
    let params = Params { n: 100, bias: 0.5 };
    scale::Call { x: x.view(), out: out.view_mut(), params, factor: 2.0, wide: true, groups: [2, 1, 1] }
        .launch::<f16, 2>(&simulator)
        .unwrap();
    let expected: Vec<_> = (0..100).map(|i| f16::from_f32((i as f32 * 2.0 + 0.5) * 2.0 + 1.0)).collect();
    assert_eq!(out.to_vec::<f16>().unwrap(), expected);
}

#[test]
fn requirements_are_checked_before_the_device() {
    let simulator = Simulator::default();
    let x = Memory::from_slice(&[0f32; 10]);
    let mut out = Memory::from_slice(&[0f32; 10]);
    let params = Params { n: 11, bias: 0.5 };
    let error =
        scale::Call { x: x.view(), out: out.view_mut(), params, factor: 2.0, wide: true, groups: [1, 1, 1] }
            .launch::<f32, 1>(&simulator)
            .unwrap_err();
    assert!(matches!(error, LaunchError::Contract(_)));
    assert_eq!(
        error.to_string(),
        "scale: x holds n numbers: `x.len() >= params.n as usize` does not hold where x.len() = 10"
    );
}

#[test]
fn a_launch_keeps_the_requirements_whoever_makes_it() {
    let instance = scale::instance::<f32, 1>();
    let x = Memory::from_slice(&[0f32; 10]);
    let mut out = Memory::from_slice(&[0f32; 10]);
    let mut new = |n, groups| {
        let arguments = vec![
            Argument::Read(x.view()),
            Argument::Write(out.view_mut()),
            Argument::plain(&Params { n, bias: 0.5 }),
            Argument::plain(&2.0f32),
            Argument::constant(true),
        ];
        Launch::new(&instance, [groups, 1, 1], 32, arguments, &Simulator::new().limits())
            .map(|launch| launch.groups())
            .map_err(|broken| broken.what)
    };
    assert_eq!(new(10, 1), Ok([1, 1, 1]));
    let Err(ContractErrorKind::Requirement { message, numbers, .. }) = new(11, 1) else {
        panic!("{:?}", new(11, 1))
    };
    assert_eq!((message, numbers.as_str()), ("x holds n numbers", "x.len() = 10"));
    assert!(matches!(new(10, 0), Err(ContractErrorKind::Groups { .. })));
}

#[test]
fn the_body_prints_as_it_reads() {
    let source = scale::instance::<bf16, 4>().source(Target::Metal);
    let body = "
    FT_SHARED_ARRAY(float, tile, 32 * N);
    const auto i = ft_thread_position(ft);
    const auto here = ft_thread_index(ft);
    if (i < params.n) {
        tile[here] = affine(ft, x[i], factor, params);
        tile[here] *= LEVELS[1];
    }
    ft_barrier(ft);
    if (i < params.n) {
        auto y = tile[here];
        if (wide) {
            y += 1.0f;
        }
        out[i] = ft_from_f32<T>(y);
    }
}
";
    assert!(source.ends_with(body), "{source}");
    assert!(scale::KERNEL.source.rust.contains("\n    let i = thread_position();\n"));
}

#[test]
fn the_example_compiles_for_cuda() {
    crate::language::compiles(&scale::instance::<bf16, 4>(), &["-DFT_CONSTANT_wide=true"]);
}
