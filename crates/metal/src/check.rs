//! The self-check: two small problems, compared with the reference.

use crate::facts::MetalFacts;
use crate::session::Session;
use flashtile_core::dtype::Dtype;
use flashtile_core::inputs::{Inputs, Outputs};
use flashtile_core::owned::OwnedTensor;
use flashtile_core::problem::{Dims, ProblemDesc, QOffset, Visibility};
use flashtile_core::quality::{Accumulation, Tolerance, compare_out};
use flashtile_core::reference;
use flashtile_core::tensor::ViewError;
use flashtile_gpu::engine::PortableEngine;
use flashtile_kernel::f16;
use flashtile_kernel::metal::Gpu;

/// The content of the file that records a passed check.
const PASSED: &[u8] = b"passed";

/// Checks a device, unless the folder of compiled kernels says that it passed before.
pub(crate) fn check(gpu: &Gpu, facts: MetalFacts) -> Result<(), String> {
    let names = ["self-check", env!("CARGO_PKG_VERSION")];
    if gpu.recall(&names).as_deref() == Some(PASSED) {
        return Ok(());
    }
    let dims = |q_len, kv_len| Dims {
        batch: 1,
        q_heads: 4,
        kv_heads: 2,
        q_len,
        kv_len,
        head_dim: 64,
        value_dim: 64,
    };
    for (op, dims) in [("prefill", dims(70, 70)), ("decode", dims(1, 200))] {
        compute(gpu, facts, dims)
            .map_err(|why| format!("{} fails the self-check of {op}: {why}", gpu.name()))?;
    }
    // Where it cannot be kept, the next process checks again.
    let _ = gpu.remember(&names, PASSED);
    Ok(())
}

fn compute(gpu: &Gpu, facts: MetalFacts, dims: Dims) -> Result<(), String> {
    let said = |error: ViewError| error.to_string();
    let tensor = |shape: [usize; 4], seed: u32| {
        OwnedTensor::from_vec(values(shape.iter().product(), seed), shape).map_err(said)
    };
    let (q, k, v) = (tensor(dims.q_shape(), 1)?, tensor(dims.k_shape(), 2)?, tensor(dims.v_shape(), 3)?);
    let mut desc = ProblemDesc::new(dims, Dtype::F16);
    desc.visibility = Visibility::causal();
    desc.q_offset = Some(QOffset::BottomRight);
    let inputs = Inputs::new(q.view(), k.view(), v.view());
    let mut out = OwnedTensor::zeros(Dtype::F16, dims.out_shape()).map_err(said)?;
    let mut session = Session::new(gpu.clone(), PortableEngine::new(facts.0));
    let computed = session.compute(&desc, &inputs, &mut Outputs::new(out.view_mut()));
    computed.map_err(|error| error.to_string())?;
    let problem = desc.validate().map_err(|error| error.to_string())?;
    let expected = reference::attention(&problem, &inputs).map_err(|error| error.to_string())?;
    let out: Vec<f16> = out.into_vec().map_err(|_| "another dtype".to_owned())?;
    let got: Vec<f32> = out.into_iter().map(f16::to_f32).collect();
    let tolerance = Tolerance::of(Dtype::F16, dims.kv_len, Accumulation::Probs);
    let report = compare_out(&got, &expected, Dtype::F16, &tolerance);
    if report.within() { Ok(()) } else { Err(format!("a wrong answer: {report}")) }
}

/// Values between -1 and 1 that differ from seed to seed, by a linear congruential generator (Knuth, The Art of Computer Programming,
/// volume 2, 3.3.4, line 16).
fn values(len: usize, seed: u32) -> Vec<f16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f16::from_f32((state >> 8) as f32 / f32::from(1u16 << 12) / f32::from(1u16 << 11) - 1.0)
    };
    (0..len).map(|_| next()).collect()
}
