//! Seeded inputs of workloads.

use fastrand::Rng;
use flashtile_core::codec::{CodePages, Codec, KvView, Side};
use flashtile_core::dtype::Dtype;
use flashtile_core::tensor::TensorView;
use flashtile_kernel::Instance;
use flashtile_kernel::source::Shape;
use half::bf16;
use rayon::prelude::*;

/// Finds the instance with native code, for the simulator.
pub(super) type Find = fn(&Instance) -> Option<Instance>;

/// Start and expected elements of each section that is compared.
pub(super) type Want = Vec<(usize, Vec<f64>)>;

/// A size of a shape.
pub(super) fn size(shape: &Shape, name: &str) -> Result<usize, String> {
    match usize::try_from(shape.get(name)) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err(format!("a shape without {name}")),
    }
}

/// Elements of a chunk, which has its own generator.
const CHUNK: usize = 1 << 20;

/// Fills memory in parallel, each chunk from its own generator.
pub(super) fn fill<T: Send>(list: &mut [T], seed: u64, next: impl Fn(&mut Rng) -> T + Sync) {
    list.par_chunks_mut(CHUNK).enumerate().for_each(|(n, chunk)| {
        let mut rng = Rng::with_seed(seed ^ (n as u64) << 32);
        chunk.iter_mut().for_each(|x| *x = next(&mut rng));
    });
}

/// Uniform in `[low, high)`.
fn uniform(rng: &mut Rng, low: f32, high: f32) -> f32 {
    low + rng.f32() * (high - low)
}

/// A random value of variance about 1, cheaper than a normal one.
pub(super) fn random_value(rng: &mut Rng) -> f32 {
    uniform(rng, -1.75, 1.75)
}

/// Fills elements of a dtype.
pub(super) fn elements(bytes: &mut [u8], dtype: Dtype, seed: u64) {
    match dtype {
        Dtype::F32 => fill(bytes.as_chunks_mut::<4>().0, seed, |rng| random_value(rng).to_le_bytes()),
        Dtype::F16 => fill(bytes.as_chunks_mut::<2>().0, seed, |rng| {
            half::f16::from_f32(random_value(rng)).to_le_bytes()
        }),
        Dtype::BF16 => {
            fill(bytes.as_chunks_mut::<2>().0, seed, |rng| bf16::from_f32(random_value(rng)).to_le_bytes())
        }
    }
}

/// Keys or values, one page per sequence.
pub(super) enum Stored {
    Elements(Vec<u8>, Dtype, [usize; 4]),
    Codes(Box<CodePages>),
}

impl Stored {
    /// Random elements, or random codes of finite values with scales near 1.
    pub(super) fn new(codec: Codec, dtype: Dtype, shape: [usize; 4], seed: u64) -> Result<Self, String> {
        if codec.dtype().is_some() {
            let mut bytes = vec![0; shape.iter().product::<usize>() * dtype.bytes()];
            elements(&mut bytes, dtype, seed);
            return Ok(Self::Elements(bytes, dtype, shape));
        }
        let mut pages = CodePages::new(codec, Side::Keys, shape).map_err(|e| e.to_string())?;
        let [entries, heads, rows, _] = shape;
        for place in 0..entries * heads {
            let bytes = pages.bytes_mut(place / heads, place % heads);
            let scales = bytes.len() - 2 * rows;
            let seed = seed ^ (place as u64 + 1) << 16;
            fill(&mut bytes[..scales], seed, |rng| rng.u8(..));
            let scale = |rng: &mut Rng| half::f16::from_f32(uniform(rng, 0.5, 1.5)).to_le_bytes();
            fill(bytes[scales..].as_chunks_mut::<2>().0, !seed, scale);
        }
        Ok(Self::Codes(Box::new(pages)))
    }

    pub(super) fn view(&self) -> Result<KvView<'_>, String> {
        match self {
            Self::Elements(bytes, dtype, [a, b, c, d]) => {
                let strides = [b * c * d, c * d, *d, 1];
                let view = TensorView::from_bytes(*dtype, bytes, [*a, *b, *c, *d], strides);
                Ok(view.map_err(|e| e.to_string())?.into())
            }
            Self::Codes(pages) => Ok(KvView::Codes(pages.view())),
        }
    }
}
